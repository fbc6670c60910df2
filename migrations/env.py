"""Alembic's entry point, online and offline.

The version table lies in the schema `outbox`, so that the user's own migrations
and ours never meet. One transaction holds it all: nothing is half made.
"""

from typing import Any

from alembic import context
from sqlalchemy import Connection, create_engine, pool

from outbox.migrations.script import run

_settings: dict[str, Any] = {
    "version_table": "alembic_version",
    "version_table_schema": "outbox",
    "transaction_per_migration": False,
}


def _run_all() -> None:
    options = context.config.attributes
    removing: bool = options.get("remove", False)
    with context.begin_transaction():
        # Two migrations at once would race for CREATE SCHEMA.
        context.execute("SELECT pg_advisory_xact_lock(1885957228, 103)")
        if removing:
            run_now("unschedule.sql")
            # Made by the owner part, it would keep the owner's role from going.
            context.execute(
                "ALTER TABLE IF EXISTS outbox.alembic_version OWNER TO CURRENT_USER"
            )
        else:
            run_now("check.sql")
            context.execute("CREATE SCHEMA IF NOT EXISTS outbox")
        context.run_migrations()
        if removing:
            context.execute("DROP TABLE IF EXISTS outbox.alembic_version")
            context.execute("DROP SCHEMA outbox")
        else:
            run_now("grants.sql")
            if options.get("with_cron", True):
                run_now("schedule.sql")


def run_now(file: str) -> None:
    """Run a repeatable file outside the chain of versions."""
    from alembic.operations import Operations

    with Operations.context(context.get_context()):
        run(file)


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
