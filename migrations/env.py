"""Alembic's entry point, online and offline.

The version table is in the schema `outbox`, so that the user's own migrations never
conflict with pillarbox's. Everything happens in one transaction, so that a failure
leaves nothing half done. It pins the search_path: it runs as an administrator, and must
not call other roles' objects. No lock request waits longer than lock_timeout, since
writers queue behind it.
"""

from typing import Any

from alembic import context
from sqlalchemy import create_engine, event, pool

from outbox.administration.migrate import LOCK_TIMEOUT
from outbox.migrations.script import Part, run
from outbox.postgres.connection import PIN_SEARCH_PATH_LOCALLY, PIN_SESSION

_TURNS = 12
_options = context.config.attributes
_settings: dict[str, Any] = {
    "version_table": "alembic_version",
    "version_table_schema": "outbox",
    "transaction_per_migration": False,
}


def _run_all() -> None:
    with context.begin_transaction():
        context.execute(PIN_SEARCH_PATH_LOCALLY)
        if _options.get("part") == Part.OWNER:
            context.execute(_options["names"].fill("SET LOCAL ROLE {owner}"))
        # Concurrent migrations would race for CREATE SCHEMA. Only migrations wait for
        # this lock, and each of them takes a while.
        context.execute(_lock_timeout(_TURNS))
        context.execute("SELECT pg_catalog.pg_advisory_xact_lock(1885957228, 103)")
        context.execute(_lock_timeout())
        if _options.get("remove", False):
            _remove()
        else:
            _make()


def _lock_timeout(times: int = 1) -> str:
    milliseconds = round(LOCK_TIMEOUT.total_seconds() * 1000)
    return f"SET LOCAL lock_timeout = {milliseconds * times}"


def _make() -> None:
    part, names = _options.get("part"), _options["names"]
    with_cron = _options.get("with_cron", True)
    cron = str(with_cron).lower()
    run("check.sql", with_cron=cron)
    # An event trigger would run before there is anything to refuse in the schemas.
    run("refuse_foreign.sql")
    if part != Part.OWNER and names.partman_schema is not None:
        context.execute(f'CREATE SCHEMA IF NOT EXISTS "{names.partman_schema}"')
        run("refuse_foreign.sql")
    run("extensions.sql", with_cron=cron)
    run("roles.sql")
    run("schemas.sql")
    # Default privileges may let others create triggers on the extension's tables.
    run("refuse_foreign.sql")
    run("grants_on_partman.sql")
    if (version := _options.get("from_version")) is not None:
        run("check_version.sql", from_version=version)
    if part != Part.ADMINISTRATOR:
        # Alembic's table belongs to the owner, too.
        context.execute(names.fill("SET LOCAL ROLE {owner}"))
        context.run_migrations()
    partman = "without_partman" if names.partman_schema is None else "with_partman"
    run(f"{partman}.sql")
    run("grants.sql")
    run("rebase.sql")
    if with_cron:
        run("schedule.sql")


def _remove() -> None:
    run("refuse_foreign.sql")
    run("unschedule.sql")
    run("remove.sql")


def _connect(dialect: Any, _record: Any, arguments: Any, options: Any) -> Any:
    """Pin the session before the dialect runs queries of its own."""
    connection = dialect.connect(*arguments, **options)
    connection.execute(PIN_SESSION)
    connection.commit()
    return connection


if context.is_offline_mode():
    # Without a paramstyle, Alembic would double each percent sign of the scripts.
    context.configure(
        dialect_name="postgresql",
        literal_binds=True,
        dialect_opts={"paramstyle": "named"},
        **_settings,
    )
    _run_all()
else:
    engine = create_engine(_options["url"], poolclass=pool.NullPool, echo=False)
    event.listen(engine, "do_connect", _connect)
    with engine.connect() as connection:
        context.configure(connection=connection, **_settings)
        _run_all()
