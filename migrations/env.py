"""Alembic's entry point, online and offline.

The version table lies in the schema `outbox`, so that the user's own migrations
and ours never meet. One transaction holds it all: nothing is half made.
"""

from typing import Any

from alembic import context
from alembic.operations import Operations
from alembic.script import Script
from sqlalchemy import Connection, create_engine, pool

from outbox.migrations.script import run

_settings: dict[str, Any] = {
    "version_table": "alembic_version",
    "version_table_schema": "outbox",
    "transaction_per_migration": False,
}


def _run_all() -> None:
    options = context.config.attributes
    with context.begin_transaction():
        # Two migrations at once would race for CREATE SCHEMA.
        context.execute("SELECT pg_advisory_xact_lock(1885957228, 103)")
        if options.get("remove", False):
            _remove()
        else:
            _make(options.get("from_version"), with_cron=options.get("with_cron", True))


def _make(from_version: str | None, *, with_cron: bool) -> None:
    run_now("check.sql")
    run_now("roles.sql")
    context.execute("CREATE SCHEMA IF NOT EXISTS outbox")
    if from_version is not None:
        run_now("check_version.sql", from_version=from_version)
    context.run_migrations()
    run_now("own_version_table.sql")
    run_now("grants_on_partman.sql")
    for version in _versions():
        if file := getattr(version.module, "grants", None):
            run_now(file)
    if with_cron:
        run_now("schedule.sql")


def _remove() -> None:
    # Also those that are gone, or nothing could be taken back from them.
    run_now("roles.sql")
    run_now("unschedule.sql")
    # Made by the owner part, it would keep the owner's role from going.
    context.execute(
        "ALTER TABLE IF EXISTS outbox.alembic_version OWNER TO CURRENT_USER"
    )
    context.run_migrations()
    context.execute("DROP TABLE IF EXISTS outbox.alembic_version")
    context.execute("DROP SCHEMA outbox")


def _versions() -> list[Script]:
    """Those that the database has when this is over, oldest first."""
    there = context.script.iterate_revisions(context.get_revision_argument(), "base")
    return list(there)[::-1]


def run_now(file: str, **values: str) -> None:
    """Run a repeatable file outside the chain of versions."""
    with Operations.context(context.get_context()):
        run(file, **values)


def _online(connection: Connection) -> None:
    context.configure(connection=connection, **_settings)
    _run_all()


if context.is_offline_mode():
    # Without the paramstyle, Alembic doubles every percent sign of the scripts.
    context.configure(
        dialect_name="postgresql",
        literal_binds=True,
        dialect_opts={"paramstyle": "named"},
        **_settings,
    )
    _run_all()
elif (given := context.config.attributes.get("connection")) is not None:
    _online(given)
else:
    engine = create_engine(
        context.config.attributes["url"], poolclass=pool.NullPool, echo=False
    )
    with engine.connect() as connection:
        _online(connection)
