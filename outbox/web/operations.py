"""Operations: retries and discards started on the page, and their execution.

waiting ──undone by a person──▶ undone
waiting ──its delay is over──▶ running ──▶ done | failed
running ──stopped by a person──▶ stopping ──▶ stopped

An operation is a row, so no page needs to stay open. The process that runs it holds a
lease; if that process dies, another one continues after the last dead letter that was
recorded. Dead letters of the last second before the crash can be tried again.
"""

import asyncio
import hmac
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    ExitStack,
    asynccontextmanager,
    suppress,
)
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
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
from outbox.postgres.remedy import remedy_of
from outbox.postgres.sql_files import load
from outbox.web.database import RIGHTS, Database
from outbox.web.dead_letters import OnSide, read_groups, sides_of
from outbox.web.events import OperationEnded, OperationRequested, OperationsUnavailable
from outbox.web.frame import Frame, Section, base_of, frame_of
from outbox.web.login import Viewer
from outbox.web.selection import Selection
from outbox.web.settings import Settings

APPLICATION_NAME: Final = "pillarbox web operations"

_LEASE: Final = timedelta(minutes=1)
_BATCH: Final = 200
_NOTE_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 1.0
_MOST_ROWS: Final = 100
_MAX_REASON: Final = 500
_SAMPLE: Final = 20
_KINDS: Final = ("retry", "discard")

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
    starts_at: datetime
    state: str
    expected: int
    succeeded: int
    failed: int
    skipped: int
    reached: dict[str, Any] | None
    problem: str | None
    worker: str | None
    started_at: datetime | None
    finished_at: datetime | None
    ended_by: str | None

    @property
    def done(self) -> int:
        """How many dead letters were tried."""
        return self.succeeded + self.failed + self.skipped

    @property
    def chosen(self) -> Selection:
        """The dead letters that were selected, none newer than the request.

        Raises:
            ConfigError: another program inserted the row with an invalid selection.
        """
        return Selection.of(self.selection).frozen(self.asked_at)

    @property
    def description(self) -> str:
        """The selection in words."""
        try:
            chosen = self.chosen
        except ConfigError as error:
            return f"an invalid selection: {error}"
        return f"{chosen.said()}, dead-lettered {chosen.window_said()}"


def read_operations(
    connection: AdministrationConnection, id: UUID | None = None
) -> list[Operation]:
    """Return the operations, unfinished ones first, or only the one with an id."""
    with connection.cursor(row_factory=class_row(Operation)) as cursor:
        return cursor.execute(
            load("outbox", "list_operations"), {"id": id, "max_rows": _MOST_ROWS}
        ).fetchall()


def _read_page(
    connection: AdministrationConnection, query: QueryParams
) -> dict[str, Any]:
    del query
    return {"operations": read_operations(connection), "most": _MOST_ROWS}


@dataclass(slots=True)
class _Progress:
    """The progress of an operation, as this process sees it."""

    counts: dict[Outcome, int] = field(
        default_factory=lambda: dict.fromkeys(Outcome, 0)
    )
    reached: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None

    @classmethod
    def of(cls, operation: Operation) -> "_Progress":
        counts = {it: getattr(operation, it.value) for it in Outcome}
        return cls(counts, dict(operation.reached or {}), operation.problem)

    def after(self, side: str) -> ListPosition | None:
        """Return the last dead letter that was tried on a side."""
        if side not in self.reached:
            return None
        at, id = self.reached[side]
        return ListPosition(datetime.fromisoformat(at), UUID(id))

    def note(self, side: str, candidate: Candidate, outcome: Outcome) -> None:
        self.counts[outcome] += 1
        self.reached[side] = [candidate.created_at.isoformat(), str(candidate.id)]

    def parameters(self) -> dict[str, Any]:
        return {
            **{outcome.value: count for outcome, count in self.counts.items()},
            "reached": Jsonb(self.reached),
            "problem": self.problem,
        }


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
        self._worker = f"{socket.gethostname()}:{os.getpid()}"
        self._asked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start looking for operations, unless it is already started."""
        if self._settings.allow_actions and self._task is None:
            self._task = asyncio.create_task(self._run(), name="pillarbox operations")

    def wake(self) -> None:
        """Look for a new operation now."""
        self.start()
        self._asked.set()

    async def stop(self) -> None:
        """Stop; an operation continues in another process, or after a restart."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        while True:
            self._asked.clear()
            try:
                found = await self._execute(
                    "claim_operation", worker=self._worker, lease=_LEASE
                )
                if found:
                    await self._carry_out(found[0][0])
                    continue
            except Exception as error:  # noqa: BLE001 (the next look may succeed)
                self._notify(
                    OperationsUnavailable(
                        reason=one_line(error), remedy=remedy_of(error)
                    )
                )
            with suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), _LOOK_SECONDS)

    async def _carry_out(self, id: UUID) -> None:
        (operation,) = await self._store.run(
            lambda connection: read_operations(connection, id)
        )
        progress = _Progress.of(operation)
        try:
            async with self._noting(operation, progress) as is_stopped:
                await self._work(operation, progress, is_stopped)
                state = "stopped" if is_stopped() else "done"
        except asyncio.CancelledError:
            await asyncio.shield(self._give_back(operation, progress))
            raise
        except Exception as error:  # noqa: BLE001 (a handler may raise anything)
            state, progress.problem = "failed", one_line(error)
        await self._execute(
            "end_operation",
            id=id,
            worker=self._worker,
            state=state,
            **progress.parameters(),
        )
        self._notify(
            OperationEnded(
                id=id,
                kind=operation.kind,
                asked_by=operation.asked_by,
                state=state,
                succeeded=progress.counts[Outcome.SUCCEEDED],
                failed=progress.counts[Outcome.FAILED],
                skipped=progress.counts[Outcome.SKIPPED],
            )
        )

    async def _give_back(self, operation: Operation, progress: _Progress) -> None:
        """Release an operation, so that another process can continue it at once."""
        with suppress(OutboxError):
            await self._note(operation, progress, timedelta(0))

    @asynccontextmanager
    async def _noting(
        self, operation: Operation, progress: _Progress
    ) -> AsyncIterator[Callable[[], bool]]:
        """Record the progress each second; yield a function that tells when to stop."""
        state = operation.state

        async def note() -> None:
            nonlocal state
            while state != "lost":
                with suppress(OutboxError):
                    state = await self._note(operation, progress, _LEASE) or "lost"
                await asyncio.sleep(_NOTE_SECONDS)

        task = asyncio.create_task(note())
        try:
            yield lambda: state in {"stopping", "lost"}
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _note(
        self, operation: Operation, progress: _Progress, lease: timedelta
    ) -> str | None:
        rows = await self._execute(
            "note_progress",
            id=operation.id,
            worker=self._worker,
            lease=lease,
            **progress.parameters(),
        )
        return str(rows[0][0]) if rows else None

    async def _work(
        self, operation: Operation, progress: _Progress, is_stopped: Callable[[], bool]
    ) -> None:
        selection = operation.chosen
        sides = [s for s in load_sides(None) if s.schema in sides_of(selection)]
        criteria = selection.criteria(
            datetime.now(UTC), status=Status.PENDING, max_rows=_BATCH
        )
        for side in sides:
            async with self._hand(operation, side) as act:
                while candidates := await self._find(criteria, progress, side):
                    for candidate in candidates:
                        if is_stopped():
                            return
                        try:
                            outcome = await act(candidate)
                        except ConfigError as error:
                            # This dead letter fails; others can still succeed.
                            outcome, progress.problem = Outcome.FAILED, str(error)
                        progress.note(side.schema, candidate, outcome)

    async def _find(
        self, criteria: Criteria, progress: _Progress, side: Side
    ) -> list[Candidate]:
        page = replace(criteria, after=progress.after(side.schema))
        return await self._database.run(
            lambda connection: DeadLetterTable(connection, side.schema).find(page)
        )

    @asynccontextmanager
    async def _hand(self, operation: Operation, side: Side) -> AsyncIterator[_Act]:
        """Yield a function that retries or discards one dead letter of a side."""
        if operation.kind == "retry":
            async with self._retrier(side) as retrier:
                yield retrier.retry
            return
        with ExitStack() as stack:
            connection = await asyncio.to_thread(
                stack.enter_context,
                administration(
                    self._settings.database,
                    application_name=APPLICATION_NAME,
                    rights=RIGHTS,
                ),
            )
            table = DeadLetterTable(connection, side.schema, side.on_discard)

            async def discard(candidate: Candidate) -> Outcome:
                count = await asyncio.to_thread(
                    table.discard, [candidate], operation.reason, operation.asked_by
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
        undo=frame.settings.undo,
        max_reason=_MAX_REASON,
    )


def _signature(
    frame: Frame, viewer: Viewer, kind: str, expected: int, selection: Selection
) -> str:
    fields = (it for field in selection.fields().items() for it in field)
    return frame.forms.sign("plan", viewer.name, kind, str(expected), *fields)


async def ask(request: Request) -> Response:
    """Record an operation, which starts after its delay."""
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
    ((id,),) = await frame.store.run(
        lambda connection: execute(
            connection,
            "insert_operation",
            {
                "kind": kind,
                "selection": Jsonb(selection.fields()),
                "reason": reason,
                "asked_by": viewer.name,
                "expected": expected,
                "delay": frame.settings.undo,
            },
        )
    )
    frame.observers.notify(
        OperationRequested(id=id, kind=kind, asked_by=viewer.name, expected=expected)
    )
    frame.runner.wake()
    return RedirectResponse(f"{base_of(request)}/operation?id={id}", 303)


async def undo(request: Request) -> Response:
    """Undo an operation that hasn't started, or stop one that is running."""
    frame = frame_of(request)
    viewer, form = await frame.acting(request)
    try:
        id = UUID(form.get("id", ""))
    except ValueError:
        raise HTTPException(404) from None
    await frame.store.run(
        lambda connection: execute(
            connection, "undo_operation", {"id": id, "person": viewer.name}
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
