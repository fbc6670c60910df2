"""The PostgreSQL server for tests, demo and benchmarks.

It is the server at a given URL, or else a private cluster, created with this machine's
server binaries, which has pg_partman and pg_cron if this machine has them.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import psycopg
from psycopg import sql

from pillarbox.outbox.administration.connection import errors_explained
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.postgres.connection import conninfo
from pillarbox.outbox.testing.cluster import Cluster, StopMode, private_cluster
from pillarbox.outbox.url import without_password

__all__ = ["PostgresServer", "StopMode", "postgres_server"]


class PostgresServer:
    """A PostgreSQL server and its main database, in which pg_cron runs.

    Not safe to use from several threads at once.
    """

    def __init__(self, url: str, cluster: Cluster | None = None) -> None:
        self._cluster = cluster
        # Without SQLAlchemy's driver, of which psycopg knows nothing.
        self.url = re.sub(r"^(\w+)\+\w+", r"\1", url)
        """The main database, as `postgresql://user@host:port/name`."""

    def database_url(self, name: str) -> str:
        """Return the URL of another database of this server."""
        address, mark, options = self.url.partition("?")
        start = "/".join(address.split("/")[:3])
        return f"{start}/{quote(name, safe='')}{mark}{options}"

    def create_database(self, name: str, template: str | None = None) -> None:
        """Create a database, as a copy of `template` if one is given.

        No session may be connected to the template.
        """
        with psycopg.connect(self.url, autocommit=True) as connection:
            create_database(connection, name, template)

    def drop_database(self, name: str) -> None:
        """Drop a database if it exists, and end the sessions connected to it."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            drop_database(connection, name)

    def start(self) -> None:
        """Start a stopped server again, under the same URLs."""
        self._own_cluster("start").start()

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server: `fast` ends its sessions, `immediate` is a crash."""
        self._own_cluster("stop").stop(mode)

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop the server, and start it again."""
        self.stop(mode)
        self.start()

    def _own_cluster(self, action: str) -> Cluster:
        if self._cluster is None:
            raise ConfigError(
                f"can't {action} the server of {without_password(self.url)}: it was "
                "not started here; omit the URL to get a private server"
            )
        return self._cluster


@contextmanager
def postgres_server(
    url: str | None = None,
    *,
    settings: Mapping[str, str] | None = None,
    durable: bool = True,
    data: Path | None = None,
) -> Iterator[PostgresServer]:
    """Yield a running server: the one at `url`, or one that is removed after the block.

    Args:
        url: an existing server, which keeps its own settings.
        settings: settings for the private server's postgresql.conf.
        durable: whether commits in the private server wait for the disk, so that they
            survive a crash of the machine.
        data: a stopped private server's data directory, which the new one begins with.
    """
    if url is not None:
        with errors_explained(url):
            psycopg.connect(conninfo(url), connect_timeout=10).close()
        yield PostgresServer(url)
        return
    with private_cluster(settings or {}, durable=durable, data=data) as cluster:
        yield PostgresServer(cluster.url, cluster)


def create_database(
    connection: psycopg.Connection, name: str, template: str | None = None
) -> None:
    """Create a database, as a copy of `template` if one is given."""
    command = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
    if template is not None:
        command += sql.SQL(" TEMPLATE {}").format(sql.Identifier(template))
    if copies_files_fast(connection):
        command += sql.SQL(" STRATEGY file_copy")
    connection.execute(command)


def drop_database(connection: psycopg.Connection, name: str) -> None:
    """Drop a database if it exists, and end the sessions connected to it."""
    command = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)")
    connection.execute(command.format(sql.Identifier(name)))


def copies_files_fast(connection: psycopg.Connection) -> bool:
    """Return whether copying a template's files is faster than logging every page.

    PostgreSQL 15 logs by default, because copying needs two checkpoints. Without fsync,
    a checkpoint costs next to nothing, and copying costs half as much as logging.
    """
    if connection.info.server_version < 150000:
        return False  # this version always copies, and doesn't know the option
    return connection.execute("SHOW fsync").fetchone() == ("off",)
