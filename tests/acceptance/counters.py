"""Counter processes on one database, and the messages they have counted."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Self

from outbox.postgres.advisory_lock import consumer_class
from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import as_role
from tests.fixtures.processes import RunningProcess, command_line
from tests.fixtures.waiting import wait_for

COUNTER = "tests.acceptance.counter:counter"
IMPATIENT = "tests.acceptance.counter:impatient"
POOLED = "tests.acceptance.counter:pooled"
_TABLES = """
    CREATE TABLE counted (
        position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        message_id uuid, key text, number int, pid int
    );
    CREATE TABLE doubt (about text);
    GRANT SELECT, INSERT ON counted, doubt TO pillarbox_consumer;
    INSERT INTO inbox.subscription (consumer, topic)
    VALUES ('counter', 'numbers.counted'), ('counter', 'numbers.doubted');
"""
_SHARES = """
    SELECT count(*)
      FROM pg_locks
     WHERE locktype = 'advisory' AND classid = %s AND objid < 16 AND granted
       AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
     GROUP BY pid
"""


# More handlers than one counter can run wait for a lock.
_BOTH_AT_WORK = """
    SELECT count(DISTINCT application_name) > 1
      FROM pg_stat_activity
     WHERE datname = current_database() AND wait_event_type = 'Lock'
       AND application_name LIKE 'counter-%%'
"""


class Counters:
    """Subscribes counters, starts them, and kills them on exit."""

    def __init__(self, url: str, directory: Path, inspection: Inspection) -> None:
        self._url = as_role(url, "pillarbox_consumer")
        self._directory = directory
        self._inspection = inspection
        self._numbers = itertools.count(1)
        self._started: list[RunningProcess] = []
        inspection.run(_TABLES)

    def start(
        self, broker: str | None = None, consumer: str = COUNTER
    ) -> RunningProcess:
        """Start another counter, and return once it has reached database and broker.

        Its broker is at the URL `broker`, or is the database.
        """
        name = f"counter-{next(self._numbers)}"
        environment = {"PILLARBOX_DATABASE_URL": self._url, "PGAPPNAME": name}
        if broker is not None:
            environment["PILLARBOX_BROKER_URL"] = broker
        counter = RunningProcess(
            command_line("pillarbox", "consume", consumer, "--log-level=debug"),
            self._directory / f"{name}.log",
            environment,
        )
        self._started.append(counter)
        counter.wait_for_log("ConsumerStarted")
        return counter

    def count(self) -> int:
        """Return how many times messages were handled."""
        ((count,),) = self._inspection.rows("SELECT count(*) FROM counted")
        return int(count)

    def count_of(self, pid: int) -> int:
        """Return how many times one counter has handled a message."""
        query = "SELECT count(*) FROM counted WHERE pid = %s"
        ((count,),) = self._inspection.rows(query, pid)
        return int(count)

    def shares(self) -> list[int]:
        """Return how many of the broker's lanes each counter holds."""
        rows = self._inspection.rows(_SHARES, consumer_class("counter") & 0xFFFFFFFF)
        return [int(share) for (share,) in rows]

    def wait_for_count(self, count: int) -> None:
        """Wait until messages were handled `count` times; fail if progress stops."""
        while (counted := self.count()) < count:
            wait_for("it goes on", partial(self._has_more, counted), pause=0.05)

    def are_at_work(self) -> bool:
        """Return whether both of two counters wait in their handlers for a lock."""
        return self._inspection.rows(_BOTH_AT_WORK) == [(True,)]

    def receipts(self) -> int:
        """Return the number of messages with a receipt."""
        query = "SELECT count(*) FROM inbox.receipt WHERE consumer = 'counter'"
        ((count,),) = self._inspection.rows(query)
        return int(count)

    def dead_letters(self) -> int:
        """Return the number of dead letters."""
        ((count,),) = self._inspection.rows("SELECT count(*) FROM inbox.dead_letter")
        return int(count)

    def waiting(self) -> int:
        """Return the number of unacked deliveries, if the database is the broker."""
        query = "SELECT count(*) FROM inbox.delivery_status WHERE acked_at IS NULL"
        ((count,),) = self._inspection.rows(query)
        return int(count)

    def duplicates(self) -> int:
        """Return how many deliveries were not the first of their message, likewise."""
        query = "SELECT count(*) - count(DISTINCT message_id) FROM inbox.message"
        ((count,),) = self._inspection.rows(query)
        return int(count)

    def numbers(self) -> dict[str, list[int]]:
        """Return the numbers of each key's messages, in the order of handling."""
        numbers: dict[str, list[int]] = defaultdict(list)
        query = "SELECT key, number FROM counted ORDER BY position"
        for key, number in self._inspection.rows(query):
            numbers[key].append(number)
        return dict(numbers)

    def logged(self, event: str) -> list[int]:
        """Return how many times each counter has logged an event."""
        return [counter.log().count(event) for counter in self._started]

    def all_have_logged(self, event: str, before: Sequence[int]) -> bool:
        """Return whether each has logged an event since `logged` returned `before`."""
        return all(
            now > then for now, then in zip(self.logged(event), before, strict=True)
        )

    def _has_more(self, counted: int) -> bool:
        return self.count() > counted

    def __iter__(self) -> Iterator[RunningProcess]:
        return iter(self._started)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for counter in self._started:
            counter.kill()
