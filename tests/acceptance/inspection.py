"""Queries about the database: settled messages, lane holders, connections."""

from collections import defaultdict
from functools import partial
from typing import Any, Literal, Self, TypeAlias

import psycopg

from pillarbox.outbox.postgres.advisory_lock import LOCK_CLASS, Lock
from tests.fixtures.waiting import wait_for

Part: TypeAlias = Literal["lease", "doorbell", "shared", "worker"]

_STATUS = "outbox.message_status WHERE"
_HOLDERS = """
    SELECT split_part(a.application_name, ' ', 4)::int, l.objid::int
      FROM pg_locks AS l
      JOIN pg_stat_activity AS a USING (pid)
     WHERE l.locktype = 'advisory' AND l.classid = %s AND l.objid < 48 AND l.granted
       AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
_SLEEPERS = """
    SELECT 1
      FROM pg_locks AS l
     WHERE l.locktype = 'advisory' AND l.classid = %s AND l.objid = %s AND l.granted
       AND l.mode = 'ExclusiveLock'
       AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
_BACKENDS = """
    SELECT pid
      FROM pg_stat_activity
     WHERE datname = current_database()
       AND application_name LIKE %s
"""


class Inspection:
    """Runs queries on its own superuser connection, which it reopens when it breaks."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._connection: psycopg.Connection[Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._connection is not None:
            self._connection.close()

    def reconnect(self) -> None:
        """Discard the connection, which may lead to another server."""
        if self._connection is not None:
            self._connection.close()

    def rows(self, query: str, *parameters: object) -> list[Any]:
        """Run a query and return its rows."""
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(self.url, autocommit=True)
            # Compiling a plan for many partitions would take seconds.
            self._connection.execute("SET jit = off")
        try:
            return self._connection.execute(query, parameters).fetchall()
        except psycopg.OperationalError:
            if not self._connection.closed:
                raise
            return self.rows(query, *parameters)

    def run(self, script: str) -> None:
        """Run statements that return no rows."""
        with psycopg.connect(self.url) as connection:
            connection.execute(script.encode())

    def count(self, rows: str, *parameters: object) -> int:
        """Return the number of rows of a table; a WHERE clause can follow its name."""
        ((count,),) = self.rows(f"SELECT count(*) FROM {rows}", *parameters)
        return int(count)

    def unsettled(self) -> int:
        """Return how many messages are not published, dead-lettered or cancelled."""
        # Doesn't use outbox.unsettled_message, because that trusts the positions.
        return self.count(
            f"{_STATUS} state NOT IN"
            " ('published', 'handled', 'dead_lettered', 'cancelled')"
        )

    def wait_until_settled(self, *, seconds: float = 90) -> None:
        """Wait until no message is unsettled; fail if progress stops."""
        while left := self.unsettled():
            what = f"fewer than {left} messages are unsettled"
            wait_for(what, partial(self._has_fewer, left), seconds=seconds, pause=0.2)

    def _has_fewer(self, unsettled: int) -> bool:
        return self.unsettled() < unsettled

    def published(self) -> set[str]:
        """Return the ids of the messages marked as published."""
        query = f"SELECT id::text FROM {_STATUS} state IN ('published', 'handled')"
        return {id for (id,) in self.rows(query)}

    def charged(self) -> int:
        """Return the number of messages charged an attempt or dead-lettered."""
        return self.count(f"{_STATUS} attempts > 0 OR state = 'dead_lettered'")

    def lanes(self) -> dict[int, set[int]]:
        """Return the lanes that each relay holds, by process id."""
        held: dict[int, set[int]] = defaultdict(set)
        for pid, lane in self.rows(_HOLDERS, LOCK_CLASS):
            assert all(lane not in others for others in held.values())
            held[pid].add(lane)
        return held

    def backends(self, relay: int, part: Part) -> set[int]:
        """Return the server processes that serve a part of a relay."""
        return {pid for (pid,) in self.rows(_BACKENDS, f"% {relay} {part}")}

    def terminate(self, relay: int, part: Part) -> set[int]:
        """Terminate and return the server processes that serve a part of a relay."""
        pids = wait_for(f"a connection for {part}", lambda: self.backends(relay, part))
        self.rows("SELECT pg_terminate_backend(pid) FROM unnest(%s) AS pid", [*pids])
        return pids

    def replace(self, relay: int, part: Part) -> None:
        """Terminate them, and wait until the relay has connected again."""
        gone = self.terminate(relay, part)
        wait_for(
            f"another connection for {part}", lambda: self.backends(relay, part) - gone
        )

    def wait_for_shares(self, shares: list[int]) -> None:
        """Wait until the relays hold these numbers of lanes."""

        def shared() -> bool:
            return sorted(map(len, self.lanes().values())) == sorted(shares)

        wait_for(f"lanes are shared as {shares}", shared, pause=0.05)

    def wait_for_sleepers(self) -> None:
        """Wait until a relay is idle and has armed the doorbell."""
        wait_for(
            "the doorbell is armed",
            lambda: self.rows(_SLEEPERS, LOCK_CLASS, Lock.OUTBOX_DOORBELL),
        )
