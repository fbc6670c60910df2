"""Where PostgreSQL comes from in tests, demo and benchmarks.

In this order: a URL given; Docker, if it has the project's image; a private
cluster from the server's binaries on this machine. Each has pg_partman and pg_cron.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol
from urllib.parse import quote

import psycopg
from psycopg import sql

from outbox.errors import ConfigError, DatabaseUnavailableError
from outbox.testing.cluster import StopMode, private_cluster
from outbox.testing.container import docker_has_the_image, private_container

__all__ = ["PostgresServer", "StopMode", "postgres_server"]


class Instance(Protocol):
    """The process or container behind a server that is ours to stop."""

    @property
    def url(self) -> str:
        """Where the main database is, the same after each start."""

    def start(self) -> None:
        """Start, and return when connections are accepted."""

    def stop(self, mode: StopMode) -> None:
        """Stop as `pg_ctl stop -m mode` does, and return when it is over."""


class PostgresServer:
    """A PostgreSQL server with its main database, in which pg_cron runs.

    Not for use from several threads at once.
    """

    def __init__(self, url: str, instance: Instance | None = None) -> None:
        self._start, self._query = split_url(url)
        self._instance = instance
        self.url = url
        """The main database, as `postgresql://user@host:port/name`."""

    def database_url(self, name: str) -> str:
        """Return the URL of another database of this server."""
        return f"{self._start}/{quote(name, safe='')}{self._query}"

    def create_database(self, name: str, template: str | None = None) -> None:
        """Create a database, as a copy of `template` if there is one.

        Nobody may be connected to the template.
        """
        command = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
        if template is not None:
            command += sql.SQL(" TEMPLATE {}").format(sql.Identifier(template))
        with psycopg.connect(self.url, autocommit=True) as connection:
            if copies_files_fast(connection):
                command += sql.SQL(" STRATEGY file_copy")
            connection.execute(command)

    def drop_database(self, name: str) -> None:
        """Drop a database if it exists, and end the sessions that are in it."""
        command = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)")
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(command.format(sql.Identifier(name)))

    def start(self) -> None:
        """Start a stopped server again, under the same URLs."""
        self._own_instance("start").start()

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server: `fast` ends its sessions, `immediate` is a crash."""
        self._own_instance("stop").stop(mode)

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop and start."""
        self.stop(mode)
        self.start()

    def _own_instance(self, action: str) -> Instance:
        if self._instance is None:
            raise ConfigError(
                f"can't {action} the server of url {hide_password(self.url)}: it was "
                "given and is not ours; leave the URL out to get a private one"
            )
        return self._instance


@contextmanager
def postgres_server(
    url: str | None = None,
    *,
    settings: Mapping[str, str] | None = None,
    durable: bool = True,
    docker: bool | None = None,
) -> Iterator[PostgresServer]:
    """Yield a running server: that of `url`, or one that lives as long as the block.

    Args:
        settings: lines for postgresql.conf; a server that was given keeps its own.
        durable: whether a commit waits for the disk, so that it survives a crash of
            the machine; a server that was given decides for itself.
        docker: whether to use Docker; None is "if it has the project's image".
    """
    if url is not None:
        check_reachable(url)
        yield PostgresServer(url)
        return
    if docker or (docker is None and docker_has_the_image()):
        with private_container(settings or {}, durable=durable) as container:
            yield PostgresServer(container.url, container)
    else:
        with private_cluster(settings or {}, durable=durable) as cluster:
            yield PostgresServer(cluster.url, cluster)


def copies_files_fast(connection: psycopg.Connection) -> bool:
    """Return whether copying a template's files takes less than logging every page.

    PostgreSQL 15 logs by default, because copying needs two checkpoints. Without fsync
    a checkpoint costs next to nothing, and a copy half of what the log does.
    """
    if connection.info.server_version < 150000:
        return False  # it can only copy, and has no word for it
    return connection.execute("SHOW fsync").fetchone() == ("off",)


def check_reachable(url: str) -> None:
    """Raise `DatabaseUnavailableError` if the server can't be talked to."""
    split_url(url)
    try:
        psycopg.connect(url, connect_timeout=10).close()
    except psycopg.OperationalError as error:
        raise DatabaseUnavailableError(
            f"can't connect to url {hide_password(url)}: {str(error).strip()}; "
            "start that server, or leave the URL out to get a private one"
        ) from error


def split_url(url: str) -> tuple[str, str]:
    """Return what stands before and after the name of the database."""
    match = re.fullmatch(r"(postgres(?:ql)?://[^/?]*)(?:/[^?]*)?(\?.*)?", url)
    if match is None:
        raise ConfigError(
            f"url {hide_password(url)} is not one of PostgreSQL; "
            "write postgresql://user@host:port/name"
        )
    return match[1], match[2] or ""


def hide_password(url: str) -> str:
    """Make a URL fit to be shown."""
    return re.sub(r"(://[^:/@]*):[^@/]*@", r"\1:***@", url)
