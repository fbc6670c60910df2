"""A streaming standby of a private PostgreSQL server."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from outbox.testing.cluster import Cluster, find_binaries
from outbox.testing.lifetime import (
    free_port,
    private_directory,
    unprivileged_user,
    watched,
)


class Standby(Cluster):
    """A cluster that follows a primary until it is promoted."""

    def follow(self, primary: str) -> None:
        """Copy the primary, and start."""
        self._run(
            *("pg_basebackup", "--dbname", primary, "--pgdata", self._data),
            *("--write-recovery-conf", "--checkpoint=fast", "--no-sync"),
        )
        self._configure({})
        self._port = free_port()
        self.start()

    def promote(self) -> None:
        """Make it a primary."""
        self._run("pg_ctl", "promote", *self._common())


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
