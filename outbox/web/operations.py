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
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, Final, TypeAlias
from uuid import UUID

import psycopg
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from pillarbox.outbox.administration.connection import (
    AdministrationConnection,
    administration,
)
from pillarbox.outbox.administration.sides import Side, load_sides
from pillarbox.outbox.dead_letters.criteria import ListPosition
from pillarbox.outbox.dead_letters.inspect import DeadLetterTable
from pillarbox.outbox.dead_letters.letter import Status
from pillarbox.outbox.dead_letters.retry import Candidate, Outcome
from pillarbox.outbox.errors import ConfigError, one_line
from pillarbox.outbox.events import Observer
from pillarbox.outbox.logs.printable import count
from pillarbox.outbox.observability.measures.processes import Process, list_processes
from pillarbox.outbox.observability.presence import this_process
from pillarbox.outbox.postgres.advisory_lock import LOCK_CLASS, Lock
from pillarbox.outbox.postgres.sql_files import load
from pillarbox.outbox.web.database import RIGHTS
from pillarbox.outbox.web.dead_letters import Groups, read_groups
from pillarbox.outbox.web.frame import Frame, Section, base_of, frame_of
from pillarbox.outbox.web.selection import (
    MAX_LENGTH,
    Selection,
    check_choice,
    check_text,
)
from pillarbox.outbox.web.settings import Settings

APPLICATION_NAME: Final = "pillarbox web operations"

_BATCH: Final = 200
_MOST_ROWS: Final = 100
_MOST_REASONS: Final = 20
_KINDS: Final = ("retry", "discard")
_LOCK: Final = {"lock_class": LOCK_CLASS, "lock": Lock.OPERATION}

_RUNS: Final = {
    "host": this_process(),
    "since": datetime.now(UTC),
    "version": version("pillarbox"),
}
"""The process that runs the handlers of retries: this one."""

_Act: TypeAlias = Callable[[Candidate], Awaitable[Outcome]]


def read_page(
    connection: AdministrationConnection, query: QueryParams
) -> dict[str, Any]:
    """Read the operations, the newest first."""
    del query
    with connection.cursor(row_factory=dict_row) as cursor:
        listing = load("outbox", "list_operations"), {"max_rows": _MOST_ROWS, **_LOCK}
        rows = cursor.execute(*listing).fetchall()
        if any(row["is_lost"] for row in rows):
            # Or it ended between the snapshot of its row and the look at the locks.
            rows = cursor.execute(*listing).fetchall()
    return {"operations": rows, "most": _MOST_ROWS}


class Runner:
    """Carries out operations, one at a time in a database. For one event loop."""

    def __init__(self, settings: Settings, notify: Observer) -> None:
        self._settings = settings
        self._notify = notify
        self._task: asyncio.Task[None] | None = None

    async def start(
        self, kind: str, selection: Selection, reason: str, person: str, expected: int
    ) -> None:
        """Record an operation and start it.

        Raises:
            ConfigError: another one is running.
        """
        run = _Run(kind=kind, selection=selection, reason=reason, person=person)
        await asyncio.to_thread(run.open, self._settings.database, expected)
        self._task = asyncio.create_task(self._carry_out(run))

    async def _carry_out(self, run: "_Run") -> None:
        state = "failed"
        problem: str | None = "the page was stopped"
        try:
            state = "done" if await self._work(run) else "stopped"
            problem = run.problem
        except Exception as error:  # noqa: BLE001 (a handler may raise anything)
            problem = one_line(error)
        finally:
            await asyncio.shield(asyncio.to_thread(run.close, state, problem))

    async def _work(self, run: "_Run") -> bool:
        """Retry or discard what is selected; return False if asked to stop."""
        for side in load_sides(None):
            if side.schema not in run.selection.sides:
                continue
            table = DeadLetterTable(run.connection, side.schema, side.on_discard)
            page = run.selection.criteria(status=Status.PENDING, max_rows=_BATCH)
            candidates = await asyncio.to_thread(table.find, page)
            if not candidates:
                continue  # nor is there need of what its retries take
            async with self._actor(run, side, table) as act:
                while candidates:
                    for candidate in candidates:
                        try:
                            outcome = await act(candidate)
                        except ConfigError as error:
                            # This dead letter fails; others can still succeed.
                            outcome, run.problem = Outcome.FAILED, str(error)
                        run.counts[outcome] += 1
                        if await asyncio.to_thread(run.record) == "stopping":
                            return False
                    last = candidates[-1]
                    page = replace(page, after=ListPosition(last.created_at, last.id))
                    candidates = await asyncio.to_thread(table.find, page)
        return True

    @asynccontextmanager
    async def _actor(
        self, run: "_Run", side: Side, table: DeadLetterTable
    ) -> AsyncIterator[_Act]:
        """Yield a function that retries or discards one dead letter of a side."""
        if run.kind == "retry":
            retrier = side.open_retrier(self._settings.retry, self._notify)
            async with retrier as opened:
                yield opened.retry
            return

        async def discard(candidate: Candidate) -> Outcome:
            discarded = await asyncio.to_thread(
                table.discard, [candidate], run.reason, run.person
            )
            return Outcome.SUCCEEDED if discarded else Outcome.SKIPPED

        yield discard


@dataclass(slots=True, kw_only=True)
class _Run:
    """An operation that this process carries out, on a session that holds the lock."""

    kind: str
    selection: Selection
    reason: str
    person: str
    id: UUID = field(init=False)
    connection: AdministrationConnection = field(init=False)
    counts: Counter[Outcome] = field(default_factory=Counter)
    problem: str | None = None
    _stack: ExitStack = field(default_factory=ExitStack)

    def open(self, url: str, expected: int) -> None:
        """Take the lock, and record the operation."""
        with ExitStack() as stack:
            self.connection = stack.enter_context(
                administration(url, application_name=APPLICATION_NAME, rights=RIGHTS)
            )
            query = "SELECT pg_try_advisory_lock(%(lock_class)s::int, %(lock)s::int)"
            ((is_free,),) = self.connection.execute(query, _LOCK).fetchall()
            if not is_free:
                raise ConfigError(
                    "another operation is running: wait until it has ended, or stop it"
                )
            values = {
                "kind": self.kind,
                "selection": Jsonb(self.selection.fields()),
                "reason": self.reason,
                "asked_by": self.person,
                "expected": expected,
            }
            ((self.id,),) = self.connection.execute(
                load("outbox", "insert_operation"), values
            ).fetchall()
            self._stack = stack.pop_all()

    def record(self, ended: str | None = None, problem: str | None = None) -> str:
        """Record the progress, and return the state in the table."""
        numbers = {outcome.value: self.counts[outcome] for outcome in Outcome}
        values = {"id": self.id, "ended": ended, "problem": problem, **numbers}
        ((state,),) = self.connection.execute(
            load("outbox", "record_progress"), values
        ).fetchall()
        return str(state)

    def close(self, state: str, problem: str | None) -> None:
        """Record how the operation ended, and release the lock."""
        # A lost session has released the lock, which shows the same.
        with self._stack, suppress(psycopg.Error):
            self.record(state, problem)


def _plan(
    connection: AdministrationConnection, selection: Selection
) -> tuple[Selection, Groups, Process | None]:
    """Count exactly what is selected now, without later dead letters.

    Returns also the newest process of a consumer whose dead letters these are.
    """
    ((now,),) = connection.execute("SELECT clock_timestamp()").fetchall()
    selection = replace(selection.frozen(now), status=Status.PENDING.value)
    groups = read_groups(connection, selection, _MOST_REASONS)
    origins = {it["origin"] for side, it in groups.rows if side == "inbox"}
    running = [
        process
        for process in (list_processes(connection, "inbox") if origins else ())
        if f"consumer:{process.name}" in origins
    ]
    newest = max(running, key=lambda it: it.since, default=None)
    return selection, groups, newest


async def show_plan(request: Request) -> Response:
    """Count what an action would do, and ask whether to do it. Changes nothing."""
    frame = frame_of(request)
    viewer, form = await frame.acting(request)
    if form.get("id", "any").strip() == "":  # which would select all
        raise ConfigError("none is checked: go back, and check some in the list")
    kind, selection = _kind_of(form), Selection.of(form)
    selection, groups, newest = await frame.database.run(
        lambda connection: _plan(connection, selection), request
    )
    for side in load_sides(None) if kind == "retry" else ():
        lacking = side.lacks(frame.settings.retry)
        if lacking is not None and side.schema in {it.side for it in groups.rows}:
            raise ConfigError(f"{lacking}; or select the other side alone")
    return frame.render(
        request,
        "plan.html",
        viewer=viewer,
        title=f"{kind.capitalize()} {count(groups.total, 'dead letter')}?",
        kind=kind,
        selection=selection,
        groups=groups,
        runs=_RUNS,
        newest=newest if kind == "retry" else None,
        plan=_seal(frame, kind, selection, str(groups.total)),
        max_reason=MAX_LENGTH,
    )


def _seal(frame: Frame, kind: str, selection: Selection, expected: str) -> str:
    """Return what proves that a dry run counted this, in any process of the page."""
    what = json.dumps([kind, selection.fields(), expected])
    key = str(frame.settings.database).encode()
    return hmac.new(key, what.encode(), "sha256").hexdigest()


def _kind_of(form: Mapping[str, str]) -> str:
    kind = form.get("kind", "")
    check_choice("kind", kind, _KINDS)
    return kind


async def ask(request: Request) -> Response:
    """Start an operation."""
    viewer, form = await frame_of(request).acting(request)
    kind, reason = _kind_of(form), form.get("why", "").strip()
    if kind == "discard" and not reason:
        raise ConfigError(
            "the reason is empty: state why; it is stored with the dead letter"
        )
    check_text("why", reason)
    selection = Selection.of(form)
    expected = form.get("expected", "")
    plan = _seal(frame_of(request), kind, selection, expected)
    if not hmac.compare_digest(plan.encode(), form.get("plan", "").encode()):
        raise ConfigError(
            "plan: not the result of a dry run; start again on the page of dead letters"
        )
    await request.app.state.runner.start(
        kind, selection, reason, viewer.name, int(expected)
    )
    return RedirectResponse(f"{base_of(request)}/operations", 303)


async def stop(request: Request) -> Response:
    """Ask the process that carries out an operation to stop it."""
    frame = frame_of(request)
    viewer, form = await frame.acting(request)
    try:
        id = UUID(form.get("id", ""))
    except ValueError:
        raise HTTPException(404) from None
    values = {"id": id, "person": viewer.name}
    statement = load("outbox", "stop_operation")
    await frame.store.run(lambda connection: connection.execute(statement, values))
    return RedirectResponse(f"{base_of(request)}/operations", 303)


SECTION: Final = Section(path="operations", title="Operations", read=read_page)
