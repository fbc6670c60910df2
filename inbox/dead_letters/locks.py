"""Lock a dead letter during its retry.

The handler runs after the lock of its dead letter and before the change of its state,
all in one transaction.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import psycopg
from psycopg.rows import tuple_row
from sqlalchemy import LargeBinary, TextClause, text
from sqlalchemy.dialects.postgresql import JSONB, UUID
from sqlalchemy.orm import Session
from typing_extensions import override

from pillarbox.inbox.connection import connection_of
from pillarbox.inbox.handlers.attempt import Attempt
from pillarbox.outbox.dead_letters.retry import Candidate
from pillarbox.outbox.dead_letters.statement import Statement, statement
from pillarbox.outbox.message import Message

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession


_PARAMETER: Final = re.compile(r"%\((\w+)\)s")
# The only style in which psycopg reads timestamps; for this transaction only.
_READABLE: Final = text("SET LOCAL DateStyle = 'ISO'")
_TYPES: Final[Mapping[Statement, Mapping[str, Any]]] = {
    Statement.READ: {"id": UUID(), "headers": JSONB(), "payload": LargeBinary()},
    Statement.LEASE_DUE: {"id": UUID()},
}


class TakenError(Exception):
    """Another session holds the dead letter or has already settled it."""


@dataclass(frozen=True, kw_only=True)
class LockedAttempt(Attempt):
    """An attempt that first locks a dead letter, and finally settles it.

    Its calls raise `TakenError` if there is nothing to lock.
    """

    candidate: Candidate

    @override
    def call(self, first: Any, new: list[Message]) -> None:
        _run(first, Statement.LOCK, self.candidate)
        super().call(first, new)

    @override
    async def call_async(self, first: Any, new: list[Message]) -> None:
        await _run_async(first, Statement.LOCK, self.candidate)
        await super().call_async(first, new)

    @override
    def settle(self, first: Any) -> None:
        _run(first, Statement.MARK_SUCCEEDED, self.candidate)

    @override
    async def settle_async(self, first: Any) -> None:
        await _run_async(first, Statement.MARK_SUCCEEDED, self.candidate)


def _run(
    session: "Session | psycopg.Connection[Any]",
    name: Statement,
    candidate: Candidate,
) -> None:
    if isinstance(session, psycopg.Connection):
        with psycopg.Cursor(session, row_factory=tuple_row) as cursor:
            cursor.execute(statement("inbox", name), candidate.parameters())
            is_found = cursor.rowcount > 0
    else:
        is_found = bool(run_statement(name, candidate.parameters(), session))
    if not is_found:
        raise TakenError


async def _run_async(
    session: "AsyncSession | psycopg.AsyncConnection[Any]",
    name: Statement,
    candidate: Candidate,
) -> None:
    if isinstance(session, psycopg.AsyncConnection):
        async with psycopg.AsyncCursor(session, row_factory=tuple_row) as cursor:
            await cursor.execute(statement("inbox", name), candidate.parameters())
            is_found = cursor.rowcount > 0
    else:
        values = candidate.parameters()
        is_found = bool(await session.run_sync(partial(run_statement, name, values)))
    if not is_found:
        raise TakenError


def run_statement(
    name: Statement, values: Mapping[str, Any], session: Session
) -> Sequence[Sequence[Any]]:
    """Run a statement on the inbox's dead letters and return its rows."""
    connection = connection_of(session)
    connection.execute(_READABLE)
    return [tuple(row) for row in connection.execute(_text_of(name), values)]


@functools.cache
def _text_of(name: Statement) -> TextClause:
    """Return a statement as an SQLAlchemy text clause, for any driver."""
    clause = text(_PARAMETER.sub(r":\1", statement("inbox", name)))
    return cast("TextClause", clause.columns(**_TYPES.get(name, {})))
