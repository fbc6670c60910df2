"""A streaming standby of a private PostgreSQL server."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import psycopg

from pillarbox.outbox.testing.cluster import Cluster, find_binaries
from pillarbox.outbox.testing.lifetime import (
    free_port,
    private_directory,
    unprivileged_user,
    watched,
)
from tests.fixtures.waiting import wait_for


class Standby(Cluster):
    """A cluster that follows a primary until it is promoted."""

    def follow(self, primary: str) -> None:
        """Copy the primary, and start."""
        self._run(
            *("pg_basebackup", "--dbname", primary, "--pgdata", self._data),
            *("--checkpoint=fast", "--no-sync"),
        )
        # Not by pg_basebackup, which can be newer than the server, and then writes
        # settings of its own libpq.
        (self._data / "standby.signal").touch()
        self._configure({"primary_conninfo": primary})
        self._port = free_port()
        self.start()

    def catch_up(self, primary: str) -> None:
        """Return once it has all that the primary has written so far."""
        with psycopg.connect(primary, autocommit=True) as connection:
            found = connection.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
            # Commits may be asynchronous.
            connection.execute("SELECT pg_switch_wal()")
        assert found is not None
        replayed = "SELECT 1 WHERE pg_last_wal_replay_lsn() >= %s"
        wait_for("replay", lambda: self._ask(replayed, *found))

    def cut_off(self) -> None:
        """Receive nothing more from the primary."""
        self._ask("ALTER SYSTEM SET primary_conninfo = ''")
        self._ask("SELECT pg_reload_conf()")
        receiving = "SELECT 1 FROM pg_stat_wal_receiver"
        wait_for("its end", lambda: self._ask(receiving) is None)

    def _ask(self, query: str, *parameters: object) -> object:
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(query.encode(), parameters)
            return cursor.fetchone() if cursor.description else None

    def promote(self) -> None:
        """Make it a primary."""
        self._run("pg_ctl", "promote", *self._common())


def either(*urls: str) -> str:
    """Return a URL that leads to the one of these servers that accepts writes."""
    first, *others = map(urlsplit, urls)
    hosts = ",".join(f"{it.hostname}:{it.port}" for it in (first, *others))
    return (
        f"postgresql://{first.username}@{hosts}{first.path}"
        "?target_session_attrs=read-write"
    )


@contextmanager
def private_standby(primary: str) -> Iterator[Standby]:
    """Yield a running standby of the server at `primary`; remove it after the block."""
    user = unprivileged_user()
    with private_directory("pillarbox-standby-", owner=user, durable=False) as folder:
        standby = Standby(find_binaries(), folder, user)
        with watched(folder, standby.pid_file, signal.SIGQUIT):
            try:
                standby.follow(primary)
                yield standby
            finally:
                if standby.pid_file.exists():
                    standby.stop("immediate")
