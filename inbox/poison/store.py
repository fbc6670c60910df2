"""Suspects in the database: messages that may have killed the process handling them.

Each start is committed here before the handler is called, and the row is deleted with
the outcome. After a takeover thousands of messages are suspects, and many of them start
and end at the same time. So while one statement is running, further messages collect,
and the next statement writes the rows of all of them.

The functions run in the transaction of the session that they are given.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, Generic, NamedTuple, TypeVar
from uuid import UUID

from sqlalchemy import Integer, TextClause, Uuid, text
from sqlalchemy.orm import Session

from pillarbox.inbox.connection import connection_of
from pillarbox.inbox.dead_letters.write import StoredFailure
from pillarbox.inbox.handlers.executor import Executor
from pillarbox.inbox.idle import limit_idle_now
from pillarbox.inbox.receipt import refusal
from pillarbox.outbox.array_literal import moment_array, plain_array, text_array
from pillarbox.outbox.message_id import is_uuid7, moment_of
from pillarbox.outbox.postgres.sql_files import load

V = TypeVar("V")
A = TypeVar("A")

_LAST_WRITE: Final = 2.0
_MAX_GROUP: Final = 1000


@dataclass(frozen=True, slots=True)
class Count:
    """The known starts of a message.

    Attributes:
        starts: their number, including a start that was just counted.
        is_counted: False if no start was counted because an earlier one never finished.
    """

    starts: int
    is_counted: bool


def count_starts(
    session: Session, ids: Collection[UUID], consumer: str, *, unless_open: bool
) -> dict[UUID, Count]:
    """Count a start of each message.

    With `unless_open`, no start is counted for a message if an earlier one never
    finished.
    """
    values = {**_rows(ids), "unless_open": unless_open}
    counted = _read(session, "count_starts", consumer, values)
    counts = {id: Count(starts, True) for id, starts in counted.items()}
    if left := [id for id in ids if id not in counts]:
        found = _read(session, "find_starts", consumer, _span(left))
        counts |= {id: Count(found.get(id, 0), False) for id in left}
    return counts


def uncount_starts(session: Session, ids: Collection[UUID], consumer: str) -> None:
    """Take back a start of each message, because it was not an attempt."""
    _run(session, "uncount_starts", consumer, _span(ids))


def keep_starts(
    session: Session, failed: Mapping[UUID, tuple[int, StoredFailure]], consumer: str
) -> None:
    """Keep the number of failed attempts of messages, and the error of the last one."""
    starts, failures = zip(*(failed[id] for id in sorted(failed)), strict=True)
    values = {
        **_rows(failed),
        "starts": plain_array(starts),
        "reasons": text_array(failure.reason for failure in failures),
        "stacktraces": text_array(failure.stacktrace for failure in failures),
    }
    _run(session, "keep_starts", consumer, values)


def find_last_error(
    id: UUID, consumer: str, unknown: str, session: Session
) -> StoredFailure | str:
    """Return what a message's handler raised last; `unknown` if that isn't known."""
    if not is_uuid7(id):
        return unknown
    values = {"id": id, "at": moment_of(id), "consumer": consumer}
    found = connection_of(session).execute(_statement("find_last_error"), values)
    row = found.first()
    return unknown if row is None else StoredFailure(*row)


def delete_starts(session: Session, ids: Collection[UUID], consumer: str) -> None:
    """Delete the starts of messages that have their outcome."""
    _run(session, "delete_starts", consumer, _span(ids))


class SuspectStore:
    """Counts the starts of one consumer's suspects. For one event loop.

    Each method returns when its row is committed.
    """

    def __init__(self, executor: Executor, consumer: str) -> None:
        def group(
            function: Callable[..., Mapping[UUID, A] | None], **options: bool
        ) -> "_Group[Any, A]":
            return _Group(executor, partial(function, consumer=consumer, **options))

        self._first = group(count_starts, unless_open=True)
        self._again = group(count_starts, unless_open=False)
        self._uncounted: _Group[None, None] = group(uncount_starts)
        self._kept: _Group[tuple[int, StoredFailure], None] = group(keep_starts)
        self._deleted: _Group[None, None] = group(delete_starts)

    async def count(self, id: UUID, *, unless_open: bool) -> Count:
        """Count a start.

        If it is cancelled meanwhile, the start may be counted: one too many.

        Raises:
            Exception: what the database raised for this message, or for all.
        """
        group = self._first if unless_open else self._again
        return await group.ask(id, None)

    async def uncount(self, id: UUID) -> None:
        """Take back a start, if possible."""
        await self._write(self._uncounted, id, None)

    async def keep(self, id: UUID, starts: int, failure: StoredFailure) -> None:
        """Keep the number of failed attempts and the last error, if possible."""
        await self._write(self._kept, id, (starts, failure))

    async def delete(self, id: UUID) -> None:
        """Delete a message's starts, if possible."""
        await self._write(self._deleted, id, None)

    async def _write(self, group: "_Group[V, None]", id: UUID, value: V) -> None:
        # A lost write leaves the message with one start too many.
        with suppress(Exception):
            async with asyncio.timeout(_LAST_WRITE):
                await group.ask(id, value)


class _Request(NamedTuple, Generic[V, A]):
    """A task's request about its message."""

    id: UUID
    value: V
    answer: asyncio.Future[A]


class _Group(Generic[V, A]):
    """Sends requests about many messages to the database, one transaction at a time.

    Args:
        function: called in a transaction with the values of different messages; returns
            the answer for each, or None if there is none to give.
    """

    def __init__(
        self,
        executor: Executor,
        function: Callable[[Session, Mapping[UUID, V]], Mapping[UUID, A] | None],
    ) -> None:
        self._executor = executor
        self._function = function
        self._waiting: deque[_Request[V, A]] = deque()
        self._askers = 0
        self._work: asyncio.Task[None] | None = None

    async def ask(self, id: UUID, value: V) -> A:
        """Return the answer about a message, from the next transaction.

        Raises:
            Exception: whatever the database raised.
        """
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(id, value, answer))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._work_off())
        self._askers += 1
        try:
            return await answer
        finally:
            self._askers -= 1
            if not self._askers and self._work is not None:
                # A transaction that hangs must not hold up later requests.
                self._work.cancel()
                self._work = None

    async def _work_off(self) -> None:
        while self._waiting:
            await self._ask(self._next())

    def _next(self) -> list[_Request[V, A]]:
        chosen: dict[UUID, _Request[V, A]] = {}
        later: list[_Request[V, A]] = []
        while self._waiting and len(chosen) < _MAX_GROUP:
            request = self._waiting.popleft()
            if request.answer.done():
                continue
            # One statement can't write a row twice.
            if chosen.setdefault(request.id, request) is not request:
                later.append(request)
        self._waiting.extendleft(reversed(later))
        return list(chosen.values())

    async def _ask(self, requests: Sequence[_Request[V, A]]) -> None:
        if not requests:
            return
        values = {request.id: request.value for request in requests}
        try:
            answers: Any = await self._executor.transact(
                partial(self._transact, values)
            )
        except Exception as error:  # noqa: BLE001 (raised by `ask`)
            if len(requests) > 1 and refusal(error, requests[0].id) is not None:
                # The day of one of them has no partition.
                half = len(requests) // 2
                await self._ask(requests[:half])
                await self._ask(requests[half:])
                return
            for request in requests:
                if not request.answer.done():
                    request.answer.set_exception(error)
        else:
            for request in requests:
                if not request.answer.done():
                    request.answer.set_result(answers and answers[request.id])

    def _transact(self, values: Mapping[UUID, V], session: Session) -> Any:
        limit_idle_now(session)
        return self._function(session, values)


def _rows(ids: Collection[UUID]) -> dict[str, str]:
    # Sorted, so that two statements never deadlock.
    ordered = sorted(ids)
    return {
        "ids": plain_array(ordered),
        "moments": moment_array(moment_of(id) for id in ordered),
    }


def _span(ids: Collection[UUID]) -> dict[str, Any]:
    ordered = sorted(ids)
    return {
        "ids": plain_array(ordered),
        "first": moment_of(ordered[0]),
        "last": moment_of(ordered[-1]),
    }


def _run(session: Session, name: str, consumer: str, values: dict[str, Any]) -> None:
    connection_of(session).execute(_statement(name), {**values, "consumer": consumer})


def _read(
    session: Session, name: str, consumer: str, values: dict[str, Any]
) -> dict[UUID, int]:
    # Drivers represent UUIDs differently.
    statement = _statement(name).columns(message_id=Uuid(), starts=Integer())
    rows = connection_of(session).execute(statement, {**values, "consumer": consumer})
    return {row.message_id: row.starts for row in rows}


@cache
def _statement(name: str) -> TextClause:
    return text(load("inbox", name))
