"""The contract of those who run handlers, each in a transaction after its receipt.

There are two, because the user's handlers have two colours: async ones run in the
loop with an `AsyncSession`, sync ones in threads with a `Session`.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeVar
from uuid import UUID

from sqlalchemy import Executable, Row, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from inbox.handlers.routes import BatchHandler, Handler
from inbox.jobs.job import AnyJob
from inbox.jobs.store import JobKey, Leased
from outbox.errors import (
    AutocommitError,
    ConfigError,
    DatabaseUnavailableError,
    one_line,
)
from outbox.events import Observer
from outbox.message import Message
from outbox.postgres.late_messages import LIST_MINIMUMS, find_short_retention
from outbox.postgres.sql_files import load
from outbox.retry import RetryPolicy

T = TypeVar("T")

TABLES: Final = text(
    "SELECT 1 FROM inbox.receipt, inbox.foreign_receipt, inbox.dead_letter,"
    " inbox.suspect LIMIT 0"
)


_STOOD_STILL: Final = "25P03"  # for longer than max_idle


class Handling(Protocol):
    """Runs handlers of one colour."""

    def check(self, handler: Handler) -> None:
        """Refuse a handler of the other colour with a `ConfigError`."""

    async def handle(self, handler: Handler, message: Message) -> bool:
        """Run the handler and commit; tell whether the message was new.

        Raises:
            DatabaseUnavailableError: the handler was not reached, through no fault
                of the message.
        """

    async def handle_batch(
        self, handler: BatchHandler, messages: Sequence[Message]
    ) -> set[UUID]:
        """Run a handler of many and commit; give the ids of those that were new.

        Raises:
            DatabaseUnavailableError: as `handle`.
        """

    async def execute(self, statement: Executable, values: dict[str, Any]) -> None:
        """Execute one statement and commit."""

    async def transact(self, function: Callable[[Session], T]) -> T:
        """Run a function of a session in a transaction of its own."""

    def job(self, key: JobKey, leased: Leased, message: Message) -> AnyJob:
        """Make what a long handler is called with."""

    async def call(self, handler: Callable[..., Any], *arguments: Any) -> Any:
        """Call a handler, without session or transaction."""

    def interrupt(self, call: asyncio.Future[Any]) -> bool:
        """End a call, if one of this colour can be; tell whether it learns of it."""

    async def probe(self) -> None:
        """Raise whatever there is to raise if the inbox's tables can't be read.

        Raises:
            AutocommitError: handlers would have no transaction.
        """

    def close(self) -> None:
        """Let go of threads, without waiting for those that still run."""


async def check_database(
    handling: Handling, retry: RetryPolicy, notify: Observer, *, is_long: bool
) -> None:
    """Look whether the inbox can be used, and keeps receipts for these retries.

    Args:
        is_long: there are long handlers, which need the jobs, too.

    Raises:
        ConfigError: it isn't there, is in AUTOCOMMIT mode, or the role of the sessions
            may not write it.
        DatabaseUnavailableError: the database is away, or is a standby.
    """
    try:
        await handling.probe()
        rights = await handling.transact(partial(_look_at_rights, is_long))
        minimums = await handling.transact(_list_minimums)
    except AutocommitError:
        raise
    except Exception as error:
        state = getattr(getattr(error, "orig", None), "sqlstate", None)
        if state in {"42P01", "3F000"}:
            raise ConfigError(
                "the database of sessions has no schema inbox: run outbox migrate "
                "--database URL for it"
            ) from error
        if state == "42501":
            raise ConfigError(
                f"the database of sessions: {one_line(error)}; grant the role "
                "pillarbox_consumer to its user"
            ) from error
        raise DatabaseUnavailableError(
            f"can't read the inbox in the database of sessions: {one_line(error)}"
        ) from error
    _check_rights(rights)
    for event in find_short_retention(retry, minimums):
        notify(event)


def _look_at_rights(is_long: bool, session: Session) -> Row[Any]:
    statement = text(load("inbox", "look_at_rights"))
    return session.execute(statement, {"is_long": is_long}).one()


def _check_rights(rights: Row[Any]) -> None:
    if rights.is_standby:
        raise DatabaseUnavailableError(
            "the database of sessions is a standby, which takes no receipts: use the "
            "URL of the primary"
        )
    if rights.is_read_only:
        raise ConfigError(
            "the database of sessions: transactions are read-only, and a consumer "
            "writes receipts; look for default_transaction_read_only in the role "
            f"{rights.role!r}, in the database and in the URL"
        )
    if rights.missing:
        raise ConfigError(
            f"the database of sessions: the role {rights.role!r} lacks "
            f"{', '.join(rights.missing)}; GRANT pillarbox_consumer TO "
            f'"{rights.role}", or use a role that has it'
        )


def _list_minimums(session: Session) -> list[Any]:
    return list(session.execute(text(LIST_MINIMUMS)))


def connection_broke(error: BaseException) -> bool:
    """Tell whether a handler failed because its connection was lost, or ended."""
    if not isinstance(error, DBAPIError):
        return False
    state = getattr(error.orig, "sqlstate", None) or ""
    return (
        error.connection_invalidated
        or state[:2] == "08"
        or state[:4] == "57P0"
        or state == _STOOD_STILL
    )


def is_cancelled() -> bool:
    """Tell a task that is cancelled from a handler that raised what looks like it."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
