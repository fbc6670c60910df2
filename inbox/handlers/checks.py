"""Checks and preparations in the handlers' database when a consumer starts."""

from functools import partial
from hashlib import sha256
from typing import Any, Final

from sqlalchemy import Row, text
from sqlalchemy.orm import Session

from pillarbox.inbox.connection import connection_of
from pillarbox.inbox.handlers.executor import Executor, identify
from pillarbox.outbox.errors import (
    ConfigError,
    DatabaseRefusedError,
    DatabaseUnavailableError,
    PrerequisiteError,
    one_line,
    sqlstate_of,
)
from pillarbox.outbox.logs.printable import for_sql
from pillarbox.outbox.postgres.days import MAKE_DAYS
from pillarbox.outbox.postgres.remedy import is_final
from pillarbox.outbox.postgres.schema_version import READ_VERSION, refuse_older
from pillarbox.outbox.postgres.sql_files import load

_UNREADABLE: Final = "can't read the inbox in the database of sessions: "


async def check_database(
    executor: Executor, *, is_long: bool, password_is_fixed: bool
) -> None:
    """Check that the inbox is usable.

    Args:
        is_long: whether there are long handlers, which also need `inbox.job`.
        password_is_fixed: whether each session gets the same password.

    Raises:
        ConfigError: the schema is missing or older than this program, the session is in
            AUTOCOMMIT mode, or its role lacks the privilege to write to the inbox.
        DatabaseUnavailableError: the database is unavailable, or is a standby.
    """
    try:
        version = await _read_version(executor)
        await executor.probe()
        rights = await executor.transact(partial(_read_rights, is_long))
    except ConfigError:
        raise
    except Exception as error:
        state = sqlstate_of(error)
        if state in {"42P01", "3F000"}:
            raise PrerequisiteError(
                "the database of sessions has no schema inbox: run pillarbox migrate "
                "--database URL for it"
            ) from error
        if is_final(error, password_is_fixed=password_is_fixed) and state != "42501":
            raise DatabaseRefusedError(_UNREADABLE + one_line(error)) from error
        if state == "42501":
            role = await executor.transact(_read_role)
            raise ConfigError(
                f"the database of sessions: {one_line(error)}; GRANT "
                f"pillarbox_consumer TO {for_sql(role)}"
            ) from error
        raise DatabaseUnavailableError(_UNREADABLE + one_line(error)) from error
    _check_rights(rights)
    refuse_older(version)


async def check_writable(executor: Executor) -> None:
    """Check that the database answers and takes receipts, as after an outage."""
    _check_rights(await executor.transact(partial(_read_rights, False)))


async def _read_version(executor: Executor) -> str | None:
    def read(session: Session) -> str:
        found = connection_of(session).execute(text(READ_VERSION)).scalar_one_or_none()
        return str(found or "")

    try:
        version = await executor.transact(read)
    except Exception as error:
        if sqlstate_of(error) == "42501":
            return None
        raise
    refuse_older(version)
    return version


async def member_id(executor: Executor) -> str:
    """Return a short id of the handlers' database; empty if its role may not know."""
    try:
        known = await executor.transact(identify)
    except Exception:  # noqa: BLE001 (it only serves a warning)
        return ""
    return f"db-{sha256(repr(known).encode()).hexdigest()[:8]}"


def _read_rights(is_long: bool, session: Session) -> Row[Any]:
    statement = text(load("inbox", "read_rights"))
    rights = connection_of(session).execute(statement, {"is_long": is_long}).one()
    if rights.is_read_only:
        session.invalidate()  # a new connection may reach the primary
    return rights


def _read_role(session: Session) -> str:
    role = connection_of(session).execute(text("SELECT current_user")).scalar_one()
    return str(role)


def _check_rights(rights: Row[Any]) -> None:
    if rights.is_standby:
        raise DatabaseUnavailableError(
            "the database of sessions is a read-only standby: use the URL of the"
            " primary"
        )
    if rights.is_read_only:
        raise PrerequisiteError(
            "the database of sessions: transactions are read-only, so receipts can't"
            " be written; check default_transaction_read_only of the role"
            f" {rights.role!r}, in the database and in the URL"
        )
    if rights.missing:
        raise ConfigError(
            f"the database of sessions: the role {rights.role!r} lacks"
            f" {', '.join(rights.missing)}; GRANT pillarbox_consumer TO"
            f" {for_sql(rights.role)}, or use a role that has it; if it has it"
            " already, pillarbox migrate restores its privileges"
        )
    if rights.hiding:
        raise ConfigError(
            f"the database of sessions: row-level security of {rights.hiding[0]} in the"
            f" schema inbox hides rows from the role {rights.role!r}; run pillarbox "
            "doctor, which prints the statements that disable it"
        )


def make_days(session: Session) -> list[Any]:
    """Create the missing partitions of all tables; return what failed."""
    return list(connection_of(session).execute(text(MAKE_DAYS)))
