"""Lock a dead letter during its retry.

The handler runs after the lock of its dead letter and before the change of its state,
all in one transaction.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

from sqlalchemy import LargeBinary, TextClause, text
from sqlalchemy.dialects.postgresql import JSONB, UUID
from sqlalchemy.orm import Session
from typing_extensions import override

from pillarbox.inbox.connection import connection_of
from pillarbox.inbox.handlers.attempt import Attempt, execute
from pillarbox.outbox.connections import is_psycopg
from pillarbox.outbox.dead_letters.retry import Candidate
from pillarbox.outbox.dead_letters.statement import Statement, statement
from pillarbox.outbox.message import Message

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
    async def call(self, first: Any, new: list[Message]) -> None:
        await self._run(first, Statement.LOCK)
        await super().call(first, new)

    @override
    async def settle(self, first: Any) -> None:
        await self._run(first, Statement.MARK_SUCCEEDED)

    async def _run(self, first: Any, name: Statement) -> None:
        values = self.candidate.parameters()
        if is_psycopg(first):
            cursor = await execute(first, statement("inbox", name), values)
            is_found = cursor.rowcount > 0
        else:
            run = partial(run_statement, name, values)
            is_sync = isinstance(first, Session)
            is_found = bool(run(first) if is_sync else await first.run_sync(run))
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
