"""Databases with pillarbox's schema, for the tests of applications.

    with databases() as made, made.new() as url:
        engine = create_engine(url)

A new database is a copy of a template, which is kept, so only the first test of a day
or of a new version waits for a migration: on a server of yours as a database, otherwise
in the data directory that private servers begin with.
"""

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Final
from uuid import uuid4

import psycopg
from psycopg import sql
from sqlalchemy import make_url

from pillarbox.outbox.administration.migrate import migrate
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from pillarbox.outbox.testing.cluster import find_binaries, private_cluster
from pillarbox.outbox.testing.postgres import (
    PostgresServer,
    create_database,
    drop_database,
    postgres_server,
)

__all__ = ["Databases", "databases"]

_VARIABLE: Final = "PILLARBOX_TEST_DATABASE_URL"
_TEMPLATE: Final = "pillarbox_template_"
_UNFINISHED: Final = "pillarbox_unfinished"
_ALONE: Final = "SELECT pg_advisory_lock(hashtext('pillarbox templates'))"
_TODAY: Final = "SELECT to_char(now() AT TIME ZONE 'UTC', 'YYYYMMDD')"
_TEMPLATES: Final = r"""
SELECT datname FROM pg_database
WHERE datname ~ '^pillarbox_template_\d{8}_[0-9a-f]{12}$'
"""


class Databases:
    """Creates databases on a server. Not safe to use from several threads at once."""

    def __init__(self, server: PostgresServer) -> None:
        self.server = server

    @contextmanager
    def new(self, like: str | None = None) -> Iterator[str]:
        """Yield the URL of a new database; drop it after the block.

        Args:
            like: the URL of another one to copy, for example with your own tables; no
                session may be connected to it. Default: only pillarbox's schema.
        """
        name = f"pillarbox_{uuid4().hex}"
        with self._alone() as connection:
            template = make_url(like).database if like else self._template(connection)
            create_database(connection, name, template)
        try:
            yield sqlalchemy_url(self.server.database_url(name))
        finally:
            self.server.drop_database(name)

    def prepare(self) -> None:
        """Create today's template if it is missing, and drop those of other days."""
        with self._alone() as connection:
            self._template(connection)

    @contextmanager
    def _alone(self) -> Iterator[psycopg.Connection]:
        """Yield a connection while no other process uses the templates."""
        with psycopg.connect(self.server.url, autocommit=True) as connection:
            connection.execute(_ALONE)
            yield connection

    def _template(self, connection: psycopg.Connection) -> str:
        # Tomorrow's needs another partition.
        ((day,),) = connection.execute(_TODAY)
        name = f"{_TEMPLATE}{day}_{_schema()}"
        kept = [template for (template,) in connection.execute(_TEMPLATES)]
        if name not in kept:
            for template in (_UNFINISHED, *kept):
                if not template.startswith(f"{_TEMPLATE}{day}"):
                    drop_database(connection, template)
            create_database(connection, _UNFINISHED)
            migrate(
                self.server.database_url(_UNFINISHED),
                with_cron=False,
                days_ahead=0,  # a copy is faster with few partitions
                partman_schema=None,
            )
            rename = sql.SQL("ALTER DATABASE {} RENAME TO {}").format(
                sql.Identifier(_UNFINISHED), sql.Identifier(name)
            )
            connection.execute(rename)
        return name


@contextmanager
def databases() -> Iterator[Databases]:
    """Yield what creates databases on the server of PILLARBOX_TEST_DATABASE_URL.

    Its role must be allowed to create databases and roles. Without the variable it is a
    private server, which this machine's PostgreSQL runs until the block ends.
    """
    url = os.environ.get(_VARIABLE)
    data = None if url else _kept_data()
    with postgres_server(url or None, durable=False, data=data) as server:
        yield Databases(server)


def _kept_data() -> Path:
    """Return the data directory of a stopped server that has today's template.

    It is in the user's cache, which other processes and later runs share.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    directory = cache / "pillarbox"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    today = datetime.now(UTC).date()
    version = subprocess.check_output([find_binaries() / "postgres", "--version"])
    version += b" with a password"  # those made before have none
    data = directory / f"{today:%Y%m%d}_{_schema()}_{sha256(version).hexdigest()[:8]}"
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not data.exists():
            for old in directory.glob("[0-9]*"):
                # A run that began before midnight may be copying yesterday's.
                if old.name < f"{today - timedelta(days=1):%Y%m%d}":
                    shutil.rmtree(old)
            unfinished = directory / "unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            with private_cluster({}, durable=False) as cluster:
                Databases(PostgresServer(cluster.url)).prepare()
                cluster.stop("fast")
                cluster.copy_data(unfinished)
            unfinished.rename(data)
    return data


@cache
def _schema() -> str:
    """Return the version of the schema: a hash of the files that make it."""
    digest = sha256()
    for file in sorted(Path(str(files("pillarbox.outbox.migrations"))).rglob("*.*")):
        if file.suffix in {".py", ".sql"}:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
