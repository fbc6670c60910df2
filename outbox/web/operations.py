"""Operations: retries and discards started on the page, and their execution.

running ──▶ done | failed
running ──stopped by a person──▶ stopping ──▶ stopped

The process of the page in which someone asked for an operation carries it out, one at a
time in a database: it holds an advisory lock meanwhile. The row in the table is the
record, and how another process asks it to stop. If the process ends, so does the
operation; ask again for what is left.
"""

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    ExitStack,
    asynccontextmanager,
    suppress,
)
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias
from uuid import UUID

from psycopg.rows import class_row
from psycopg.types.json import Jsonb
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from outbox.administration.connection import AdministrationConnection, administration
from outbox.administration.sides import Side, load_sides
from outbox.dead_letters.criteria import Criteria, ListPosition
from outbox.dead_letters.inspect import DeadLetterTable
from outbox.dead_letters.letter import Status
from outbox.dead_letters.retry import Candidate, Outcome, Retrier
from outbox.errors import ConfigError, OutboxError, one_line
from outbox.events import Observer
from outbox.postgres.advisory_lock import LOCK_CLASS, Lock
from outbox.postgres.sql_files import load
from outbox.web.database import RIGHTS, Database
from outbox.web.dead_letters import OnSide, read_groups, sides_of
from outbox.web.events import OperationEnded, OperationRequested
from outbox.web.frame import Frame, Section, base_of, frame_of
from outbox.web.login import Viewer
from outbox.web.selection import Selection
from outbox.web.settings import Settings

APPLICATION_NAME: Final = "pillarbox web operations"

_BATCH: Final = 200
_NOTE_SECONDS: Final = 1.0
_MOST_ROWS: Final = 100
_MAX_REASON: Final = 500
_SAMPLE: Final = 20
_KINDS: Final = ("retry", "discard")
_LOCK: Final = {"lock_class": LOCK_CLASS, "lock": Lock.OPERATION}

_Act: TypeAlias = Callable[[Candidate], Awaitable[Outcome]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A retry or discard that a viewer requested, and its progress."""

    id: UUID
    kind: str
    selection: dict[str, str]
    reason: str
    asked_by: str
    asked_as: str
    asked_at: datetime
    state: str
    expected: int
    succeeded: int
    failed: int
    skipped: int
    problem: str | None
    finished_at: datetime | None
    stopped_by: str | None

    @property
    def done(self) -> int:
        """How many dead letters were tried."""
        return self.succeeded + self.failed + self.skipped

    @property
    def description(self) -> str:
        """The selection in words."""
        return ", ".join(f"{name} {value}" for name, value in self.selection.items())


def read_operations(
    connection: AdministrationConnection, id: UUID | None = None
) -> list[Operation]:
    """Return the operations, unfinished ones first, or only the one with an id."""
    with connection.cursor(row_factory=class_row(Operation)) as cursor:
        return cursor.execute(
            load("outbox", "list_operations"),
            {"id": id, "max_rows": _MOST_ROWS, **_LOCK},
        ).fetchall()


def _read_page(
    connection: AdministrationConnection, query: QueryParams
) -> dict[str, Any]:
    del query
    return {"operations": read_operations(connection), "most": _MOST_ROWS}


class Runner:
    """Carries out operations, one at a time. For one event loop.

    Args:
        database: sessions for reading.
        store: sessions for writing.
        notify: called with each event.
    """

    def __init__(
        self, settings: Settings, database: Database, store: Database, notify: Observer
    ) -> None:
        self._settings = settings
        self._database = database
        self._store = store
        self._notify = notify
        self._task: asyncio.Task[None] | None = None

    async def start(
        self, kind: str, selection: Selection, reason: str, asked_by: str, expected: int
    ) -> UUID:
        """Record an operation and start it.

        Raises:
            ConfigError: another one is running.
        """
        stack = ExitStack()
        try:
            connection = await asyncio.to_thread(self._locked, stack)
            ((id,),) = await self._execute(
                "insert_operation",
                kind=kind,
                selection=Jsonb(selection.fields()),
                reason=reason,
                asked_by=asked_by,
                expected=expected,
            )
        except BaseException:
            await asyncio.to_thread(stack.close)
            raise
        run = _Run(id, kind, selection, reason, asked_by, connection)
        self._notify(
            OperationRequested(id=id, kind=kind, asked_by=asked_by, expected=expected)
        )
        self._task = asyncio.create_task(self._carry_out(run, stack))
        return UUID(str(id))

    async def stop(self) -> None:
        """End a running operation, and record that."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def _locked(self, stack: ExitStack) -> AdministrationConnection:
        connection = stack.enter_context(
            administration(
                self._settings.database,
                application_name=APPLICATION_NAME,
                rights=RIGHTS,
            )
        )
        query = "SELECT pg_try_advisory_lock(%(lock_class)s::int, %(lock)s::int)"
        ((is_free,),) = connection.execute(query, _LOCK).fetchall()
        if not is_free:
            raise ConfigError(
                "another operation is running: wait until it has ended, or stop it"
            )
        return connection

    async def _carry_out(self, run: "_Run", stack: ExitStack) -> None:
        state = "failed"
        problem: str | None = "the page was stopped"
        try:
            async with self._noting(run) as is_stopped:
                await self._work(run, is_stopped)
                state = "stopped" if is_stopped() else "done"
                problem = run.problem
        except Exception as error:  # noqa: BLE001 (a handler may raise anything)
            problem = one_line(error)
        finally:
            await asyncio.shield(self._end(run, state, problem, stack))
        self._notify(
            OperationEnded(
                id=run.id,
                kind=run.kind,
                asked_by=run.asked_by,
                state=state,
                **{it.value: count for it, count in run.counts.items()},
            )
        )

    async def _end(
        self, run: "_Run", state: str, problem: str | None, stack: ExitStack
    ) -> None:
        try:
            # Without the database the lock is free, too, which shows the same.
            with suppress(OutboxError):
                await self._execute(
                    "end_operation", **run.parameters(), state=state, problem=problem
                )
        finally:
            await asyncio.to_thread(stack.close)

    @asynccontextmanager
    async def _noting(self, run: "_Run") -> AsyncIterator[Callable[[], bool]]:
        """Record the progress each second.

        Yield a function that returns True when the operation must stop.
        """
        state = "running"

        async def note() -> None:
            nonlocal state
            while True:
                with suppress(OutboxError):
                    ((state,),) = await self._execute(
                        "note_progress", **run.parameters()
                    )
                await asyncio.sleep(_NOTE_SECONDS)

        task = asyncio.create_task(note())
        try:
            yield lambda: state == "stopping"
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _work(self, run: "_Run", is_stopped: Callable[[], bool]) -> None:
        sides = [s for s in load_sides(None) if s.schema in sides_of(run.selection)]
        criteria = run.selection.criteria(
            datetime.now(UTC), status=Status.PENDING, max_rows=_BATCH
        )
        for side in sides:
            async with self._hand(run, side) as act:
                page = criteria
                while candidates := await self._find(page, side):
                    for candidate in candidates:
                        if is_stopped():
                            return
                        try:
                            outcome = await act(candidate)
                        except ConfigError as error:
                            # This dead letter fails; others can still succeed.
                            outcome, run.problem = Outcome.FAILED, str(error)
                        run.counts[outcome] += 1
                    last = candidates[-1]
                    page = replace(page, after=ListPosition(last.created_at, last.id))

    async def _find(self, page: Criteria, side: Side) -> list[Candidate]:
        return await self._database.run(
            lambda connection: DeadLetterTable(connection, side.schema).find(page)
        )

    @asynccontextmanager
    async def _hand(self, run: "_Run", side: Side) -> AsyncIterator[_Act]:
        """Yield a function that retries or discards one dead letter of a side."""
        if run.kind == "retry":
            async with self._retrier(side) as retrier:
                yield retrier.retry
            return
        table = DeadLetterTable(run.connection, side.schema, side.on_discard)

        async def discard(candidate: Candidate) -> Outcome:
            count = await asyncio.to_thread(
                table.discard, [candidate], run.reason, run.asked_by
            )
            return Outcome.SUCCEEDED if count else Outcome.SKIPPED

        yield discard

    def _retrier(self, side: Side) -> AbstractAsyncContextManager[Retrier]:
        problem = why_not(self._settings, side)
        if problem is not None or self._settings.retry is None:
            raise ConfigError(problem or "retries are off")
        return side.open_retrier(self._settings.retry, self._notify)

    async def _execute(self, name: str, **values: Any) -> list[tuple[Any, ...]]:
        return await self._store.run(
            lambda connection: execute(connection, name, values)
        )


class _Run:
    """An operation that this process carries out, and its progress."""

    def __init__(
        self,
        id: UUID,
        kind: str,
        selection: Selection,
        reason: str,
        asked_by: str,
        connection: AdministrationConnection,
    ) -> None:
        self.id = id
        self.kind = kind
        self.selection = selection
        self.reason = reason
        self.asked_by = asked_by
        self.connection = connection
        self.counts = dict.fromkeys(Outcome, 0)
        self.problem: str | None = None

    def parameters(self) -> dict[str, Any]:
        counts = {outcome.value: count for outcome, count in self.counts.items()}
        return {"id": self.id, **counts}


def execute(
    connection: AdministrationConnection, name: str, values: Mapping[str, Any]
) -> list[tuple[Any, ...]]:
    """Run a statement of this module and return its rows."""
    cursor = connection.execute(load("outbox", name), values)
    return cursor.fetchall() if cursor.description else []


def why_not(settings: Settings, side: Side) -> str | None:
    """Return what is missing to retry a side's dead letters; None if nothing is."""
    if settings.retry is None:
        return (
            "this page can't retry dead letters: start pillarbox web with --broker "
            "for those of the outbox, with --consumer for those of the inbox"
        )
    return side.lacks(settings.retry)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The result of a dry run: what an operation would do."""

    selection: Selection
    now: datetime
    expected: int
    by_reason: list[OnSide]
    sample: list[OnSide]


def _plan(connection: AdministrationConnection, selection: Selection) -> _Plan:
    """Count exactly what is selected now, without later dead letters."""
    ((now,),) = connection.execute("SELECT clock_timestamp()").fetchall()
    selection = replace(selection.frozen(now), status=Status.PENDING.value)
    sides = sides_of(selection)
    criteria = selection.criteria(now)
    found = {
        side: read_groups(connection, side, replace(criteria, max_rows=_SAMPLE))
        for side in sides
    }
    sample = [
        OnSide(side, letter)
        for side in sides
        for letter in DeadLetterTable(connection, side).summaries(
            replace(criteria, max_rows=_SAMPLE)
        )
    ]
    return _Plan(
        selection=selection,
        now=now,
        expected=sum(groups[0].total for groups in found.values() if groups),
        by_reason=[OnSide(side, group) for side in sides for group in found[side]],
        sample=sample[:_SAMPLE],
    )


async def show_plan(request: Request) -> Response:
    """Count what an action would do, and ask whether to do it. Changes nothing."""
    frame = frame_of(request)
    viewer, form = await frame.acting(request)
    kind = form.get("kind", "")
    if kind not in _KINDS:
        raise ConfigError(f"kind {kind!r}: use {' or '.join(_KINDS)}")
    selection = Selection.of(form)
    lacking: dict[str, str] = {}
    if kind == "retry":
        problems = {
            side.schema: why_not(frame.settings, side)
            for side in load_sides(None)
            if side.schema in sides_of(selection)
        }
        lacking = {side: said for side, said in problems.items() if said is not None}
        able = [side for side in problems if side not in lacking]
        if len(able) == 1:
            selection = replace(selection, side=able[0])
        if not able:
            raise ConfigError("; ".join(dict.fromkeys(lacking.values())))
    plan = await frame.database.run(lambda connection: _plan(connection, selection))
    return frame.render(
        request,
        "plan.html",
        viewer=viewer,
        title=f"{kind.capitalize()} {plan.expected:,} dead letter"
        f"{'' if plan.expected == 1 else 's'}?",
        kind=kind,
        plan=plan,
        lacking=lacking,
        signature=_signature(frame, viewer, kind, plan.expected, plan.selection),
        max_reason=_MAX_REASON,
    )


def _signature(
    frame: Frame, viewer: Viewer, kind: str, expected: int, selection: Selection
) -> str:
    fields = (it for field in selection.fields().items() for it in field)
    return frame.forms.sign("plan", viewer.name, kind, str(expected), *fields)


async def ask(request: Request) -> Response:
    """Start an operation."""
    frame = frame_of(request)
    viewer, form = await frame.acting(request)
    kind, reason = form.get("kind", ""), form.get("why", "").strip()
    if kind not in _KINDS:
        raise ConfigError(f"kind {kind!r}: use {' or '.join(_KINDS)}")
    if kind == "discard" and not reason:
        raise ConfigError("the reason is empty: say why, for those who ask later")
    if "\0" in reason or len(reason) > _MAX_REASON:
        raise ConfigError(
            f"the reason has {len(reason)} characters: use at most {_MAX_REASON}, "
            "without NUL characters"
        )
    selection, counted = Selection.of(form), form.get("expected", "")
    expected = int(counted) if counted.isdecimal() else -1
    # Nobody can act on more than what the dry run showed.
    if not hmac.compare_digest(
        _signature(frame, viewer, kind, expected, selection).encode(),
        form.get("signature", "").encode(errors="replace"),
    ):
        raise ConfigError(
            "this isn't the dry run that the page showed you, or the page was "
            "restarted since: begin on the page of dead letters"
        )
    id = await frame.runner.start(kind, selection, reason, viewer.name, expected)
    return RedirectResponse(f"{base_of(request)}/operation?id={id}", 303)


async def stop(request: Request) -> Response:
    """Ask the process that carries out an operation to stop it."""
    frame = frame_of(request)
    viewer, form = await frame.acting(request)
    try:
        id = UUID(form.get("id", ""))
    except ValueError:
        raise HTTPException(404) from None
    await frame.store.run(
        lambda connection: execute(
            connection, "stop_operation", {"id": id, "person": viewer.name}
        )
    )
    return RedirectResponse(f"{base_of(request)}/operation?id={id}", 303)


SECTION: Final = Section(
    path="operations", title="Operations", shortcut="o", read=_read_page
)


def _read_one(
    connection: AdministrationConnection, query: QueryParams
) -> dict[str, Any]:
    try:
        found = read_operations(connection, UUID(query.get("id", "")))
    except ValueError:
        found = []
    if not found:
        raise HTTPException(404, "There is no such operation.")
    return {"operation": found[0]}


ONE: Final = Section(path="operation", title="Operation", shortcut="", read=_read_one)
"""One operation, whose id is a parameter of its address."""
