"""Alembic's entry point, online and offline.

The version table is in the schema `outbox`, so that the user's own migrations never
conflict with pillarbox's. The revisions are in a transaction that ends soon after the
last one, since what they lock stays locked until then. What may take longer is in
others. Each can be repeated, and leaves nothing half done if it fails; until all have
run, relays and consumers that start wait. All pin the search_path: they run as an
administrator, and must not call other roles' objects.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Final

from alembic import context
from alembic.util import CommandError
from psycopg.errors import Diagnostic
from sqlalchemy import Connection, create_engine, event, pool, text

from pillarbox.outbox.administration.migrate import LOCK_TIMEOUT, PATIENCE
from pillarbox.outbox.migrations.script import Part, run
from pillarbox.outbox.postgres.connection import PIN_SEARCH_PATH_LOCALLY, PIN_SESSION

_LONG: Final = timedelta(seconds=10)
"""How long to wait for a lock that nobody queues behind."""
_options = context.config.attributes
_names = _options["names"]
_applied: list[Any] = []
"""The revisions that have run."""
_settings: dict[str, Any] = {
    "version_table": "alembic_version",
    "version_table_schema": "outbox",
    "transaction_per_migration": False,
    "on_version_apply": lambda *, step, **_: _applied.append(step),
}


def _run_all() -> None:
    is_printed = context.is_offline_mode()
    is_theirs = not is_printed and context.get_bind().in_transaction()
    if _options.get("remove"):
        with _transaction(_LONG):
            _remove()
        return
    with _transaction(_LONG if is_printed or is_theirs else LOCK_TIMEOUT):
        _upgrade()
        # A first installation holds nobody up; in two parts, processes that start in
        # between would find tables for which they lack the privileges.
        is_whole = is_printed or any(not step.down_revision_ids for step in _applied)
        if is_whole:
            _complete()
    if not is_whole:
        with _transaction(_LONG if is_theirs else LOCK_TIMEOUT):
            _complete()
    if not _options["with_cron"]:
        days = str(_options["days_ahead"])
        for schema in ("outbox", "inbox"):
            # Apart, because a transaction can hold a limited number of locks.
            with _transaction(_LONG):
                run("premake.sql", schema=schema, days=days)
    if not is_theirs:
        # It reads rows, which would prolong the locks of a transaction of the caller's.
        with _transaction(_LONG):
            run("validate.sql")


@contextmanager
def _transaction(lock_timeout: timedelta) -> Iterator[None]:
    """Run in a transaction, after other migrations."""
    with context.begin_transaction(), _pinned_settings():
        # They would race for CREATE SCHEMA, and each takes a while.
        context.execute(_set_lock_timeout(PATIENCE))
        context.execute("SELECT pg_catalog.pg_advisory_xact_lock(1885957228, 103)")
        context.execute(_set_lock_timeout(lock_timeout))
        yield


def _set_lock_timeout(limit: timedelta) -> str:
    return f"SET LOCAL lock_timeout = {limit // timedelta(milliseconds=1)}"


def _upgrade() -> None:
    part = _options.get("part")
    cron = str(_options["with_cron"]).lower()
    runs_all = str(part != Part.ADMINISTRATOR).lower()
    run("check.sql", with_cron=cron)
    # An event trigger would run before there is anything to refuse in the schemas.
    run("refuse_foreign.sql", runs_all=runs_all)
    for schema in ("outbox", "inbox", _names.partman_schema):
        if part != Part.OWNER and schema is not None:
            context.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}"')
    run("revoke_defaults.sql")
    run("refuse_foreign.sql", runs_all=runs_all)
    run("extensions.sql", with_cron=cron)
    run("roles.sql")
    run("schemas.sql")
    run("grants_on_partman.sql", grant="GRANT", to="TO")
    # Last, since what the revisions lock stays locked until the transaction ends.
    if part != Part.ADMINISTRATOR:
        context.run_migrations()
    # An administrator writes the version: nobody else may have a trigger on its table.
    run("own.sql")
    run("revoke_defaults.sql")
    if _applied:
        run("hide_version.sql")


def _complete() -> None:
    if _names.partman_schema is None:
        run("without_partman.sql")
    else:
        run("with_partman.sql")
    run("grants.sql")
    run("restore.sql")
    run("rebase.sql")
    if _options["with_cron"]:
        run("schedule.sql")


def _remove() -> None:
    run("refuse_foreign.sql", runs_all="true")
    # Create missing roles, without which REVOKE would fail.
    run("roles.sql")
    run("unschedule.sql")
    run("remove.sql")
    run("grants_on_partman.sql", grant="REVOKE", to="FROM")
    run("remove_roles.sql")


def _online(connection: Connection) -> None:
    context.configure(connection=connection, **_settings)
    _run_all()


@contextmanager
def _pinned_settings() -> Iterator[None]:
    """Pin settings for the transaction, and restore the session's afterwards."""
    if context.is_offline_mode():
        context.execute(PIN_SEARCH_PATH_LOCALLY)
        if _options.get("part") == Part.OWNER:
            context.execute(_names.fill("SET LOCAL ROLE {owner}"))
        yield
        return
    connection = context.get_bind()
    before = connection.execute(
        text(
            "SELECT pg_catalog.current_setting('search_path') AS path,"
            " pg_catalog.current_setting('lock_timeout') AS timeout"
        )
    ).one()
    connection.execute(text(PIN_SEARCH_PATH_LOCALLY))
    # For the session, since pg_partman's routines set them beyond the transaction.
    restore = text(
        "SELECT pg_catalog.set_config('search_path', :path, false),"
        " pg_catalog.set_config('lock_timeout', :timeout, false)"
    )
    values = {"path": before.path, "timeout": before.timeout}
    try:
        yield
    except CommandError:
        # Unlike a database error, this one doesn't abort the user's transaction.
        connection.execute(restore, values)
        raise
    connection.execute(restore, values)


def _tell_warning(tell: Callable[[str], None], notice: Diagnostic) -> None:
    if notice.severity_nonlocalized == "WARNING" and notice.message_hint:
        tell(f"{notice.message_primary}; {notice.message_hint}")


def _connect(dialect: Any, _record: Any, arguments: Any, options: Any) -> Any:
    """Pin the session before the dialect runs queries of its own."""
    connection = dialect.connect(*arguments, **options)
    if (tell := _options.get("tell")) is not None:
        connection.add_notice_handler(partial(_tell_warning, tell))
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
elif (given := _options.get("connection")) is not None:
    _online(given)
else:
    engine = create_engine(_options["url"], poolclass=pool.NullPool, echo=False)
    event.listen(engine, "do_connect", _connect)
    with engine.connect() as connection:
        _online(connection)
