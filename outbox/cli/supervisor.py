"""Run a relay, a consumer or a similar process, with background tasks."""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, TypeAlias, TypeVar

import typer

from pillarbox.outbox.cli.command import Duration, duration_option
from pillarbox.outbox.cli.processes import LOOPBACK, Parent
from pillarbox.outbox.cli.start import Start
from pillarbox.outbox.dead_letters.retry import Retrier
from pillarbox.outbox.dead_letters.schedule import RetrySchedule, Scheduler
from pillarbox.outbox.dead_letters.statement import Schema
from pillarbox.outbox.errors import ConfigError, OutboxError, leaves_of
from pillarbox.outbox.events import Event, Observer, Observers
from pillarbox.outbox.gather import end
from pillarbox.outbox.observability.activity import Activity, Counts
from pillarbox.outbox.observability.database_measure import DatabaseMeasure
from pillarbox.outbox.observability.endpoints import FORMS, listening
from pillarbox.outbox.observability.health import Health
from pillarbox.outbox.observability.heartbeat import beating
from pillarbox.outbox.observability.logging import LogEvents
from pillarbox.outbox.observability.measures.reading import Scope
from pillarbox.outbox.observability.standard_error import write_error
from pillarbox.outbox.observability.watchdog import Watchdog

if TYPE_CHECKING:
    from pillarbox.outbox.observability.prometheus import PrometheusEvents

T = TypeVar("T")
Background: TypeAlias = Callable[[], Coroutine[Any, Any, None]]

_WATCHING: Final = "Watching"


@dataclass(frozen=True, kw_only=True)
class Watching:
    """The options for watching a process.

    Attributes:
        metrics_interval: how often the database is measured for the metrics. That reads
            what `pillarbox status` reads, and alerts wait for minutes.
        log_interval: how often a process logs what it has done, unless it did nothing.
    """

    metrics_interval: ClassVar[timedelta] = timedelta(seconds=60)
    log_interval: ClassVar[timedelta] = timedelta(seconds=60)

    listen: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Address that serves /live, /ready, and /metrics for Prometheus: "
            f"{FORMS.replace('[', chr(92) + '[')}.",
            show_default="nowhere",
            rich_help_panel=_WATCHING,
        ),
    ] = None
    watchdog: Annotated[
        timedelta,
        duration_option(
            help="Exit with status 70 if the event loop is blocked for this long; 0s: "
            "never.",
            rich_help_panel=_WATCHING,
        ),
    ] = Duration(seconds=60)

    def metrics(self) -> "PrometheusEvents | None":
        """Create the observer that feeds the metrics; None if they aren't served.

        Raises:
            ConfigError: the extra is missing.
        """
        if self.listen is None:
            return None
        try:
            from prometheus_client import disable_created_metrics

            from pillarbox.outbox.observability.prometheus import PrometheusEvents
        except ImportError as error:
            raise ConfigError(
                f"listen={self.listen}: {error}; pip install 'pillarbox[cli]'"
            ) from error
        # They would double the number of series.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        return PrometheusEvents()


RetryInterval: TypeAlias = Annotated[
    timedelta,
    duration_option(
        envvar="PILLARBOX_DEAD_LETTER_INTERVAL",
        help="How often to retry due dead letters; 0s: never.",
        rich_help_panel="Dead letters",
    ),
]
_AFTER_DRAIN: Final = 8.0
"""Seconds in which a process disconnects."""
RETRY_INTERVAL: Final = Duration.of(RetrySchedule().interval)


def schedule_of(interval: timedelta) -> RetrySchedule | None:
    """Return the schedule of this interval; None for 0."""
    return RetrySchedule(interval=interval) if interval else None


class Watched:
    """A relay or consumer with what watches it: log, health, watchdog and metrics.

    Args:
        wait: how long it may try to start; None: without limit.
        started: the event after which it is ready.
        counts: an observer that counts what it does.
        metrics: creates its own metrics beside those that all processes have.
        scope: what is measured in the database.
        database: returns the URL of that database.

    Attributes:
        observers: its observers.
        notify: passes an event of a background task to the log and to the metrics.
    """

    def __init__(
        self,
        watching: Watching,
        *,
        wait: timedelta | None,
        started: type[Event],
        counts: Counts,
        metrics: "Callable[[PrometheusEvents], Observer]",
        scope: Scope,
        database: Callable[[], str],
    ) -> None:
        self._watching = watching
        self._parent = Parent.take()
        self._health = Health(started)
        reported: list[Observer] = [LogEvents()]
        self._exported = exported = watching.metrics()
        if exported is not None:
            from pillarbox.outbox.observability.prometheus import DatabaseMetrics

            try:
                own = metrics(exported)
                reported += [exported, own, DatabaseMetrics(exported.registry)]
            except OSError as error:
                raise ConfigError(
                    f"PROMETHEUS_MULTIPROC_DIR: {error}; create the directory, or unset"
                    " the variable"
                ) from error
        self.notify = Observers(reported).notify
        self.observers: list[Observer] = [*reported, self._health, counts]
        self._start = Start(wait, Observers(self.observers).notify)

        def note(event: Event) -> None:
            if type(event) is started:
                self._start.done.set()
                if self._parent is not None:
                    self._parent.report_start()

        self.observers.append(note)
        self._background: list[Background] = [
            Activity(counts, watching.log_interval, self.notify).run
        ]
        if exported is not None:
            measure = DatabaseMeasure(
                database,
                scope,
                seconds=watching.metrics_interval.total_seconds(),
                notify=self.notify,
            )
            self._background.append(measure.run)

    def retry(
        self,
        schedule: RetrySchedule | None,
        open_retrier: Callable[[], AbstractAsyncContextManager[Retrier]],
        *,
        schema: Schema,
        origin: str,
    ) -> None:
        """Also retry dead letters in the background, if there is a schedule."""
        if schedule is not None:
            scheduler = Scheduler(
                open_retrier,
                schedule,
                schema=schema,
                origin=origin,
                notify=self.notify,
            )
            self._background.append(scheduler.run)

    def run(
        self,
        process: Background,
        stop: Callable[[], None],
        drain: timedelta,
    ) -> None:
        """Run a process; SIGTERM or SIGINT drains it, a second one ends it at once.

        Args:
            process: runs it until it has drained; called again if it can't start.
            stop: makes it drain, once it has started.
            drain: how long that takes at most, before it disconnects.
        """
        limit = self._watching.watchdog.total_seconds()
        watchdog = Watchdog(limit) if limit else None
        last = threading.Timer(drain.total_seconds() + _AFTER_DRAIN, give_up)
        last.daemon = True

        def halt() -> None:
            self._start.stopping.set()
            if self._start.done.is_set():
                stop()

        def drain_now() -> None:
            self._health.stopping()
            halt()
            if not last.is_alive():
                last.start()

        def begin_drain(number: int) -> None:
            drain_now()
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

        async def drain_with(parent: Parent) -> None:
            await parent.wait_for_stop()
            drain_now()

        async def once_started(task: Background) -> None:
            await self._start.done.wait()
            await task()

        background = [partial(once_started, task) for task in self._background]
        if self._parent is not None:
            background.append(partial(drain_with, self._parent))

        async def run() -> None:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, begin_drain, number)
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(beating())
                if watchdog is not None:
                    await stack.enter_async_context(watchdog.watching())
                where: str | None = None
                address, exported = self._watching.listen, self._exported
                if address is not None and exported is not None:
                    served = {**self._health.handlers(), **exported.handlers()}
                    serving = listening(address, served)
                    if self._parent is not None:
                        serving = listening(LOOPBACK, served, level=logging.DEBUG)
                    where = await stack.enter_async_context(serving)
                if self._parent is not None:
                    self._parent.report_run(where)
                await supervise(partial(self._start.run, process), halt, background)

        try:
            run_coroutine(run())
        finally:
            last.cancel()


def give_up() -> None:
    """Exit at once: after its drain, a process waits for a server that hangs."""
    write_error("a server doesn't answer; exiting without disconnecting from it\n")
    os._exit(0)


async def supervise(
    process: Callable[[], Awaitable[None]],
    stop: Callable[[], None],
    background: Sequence[Background],
) -> None:
    """Run a process with background tasks, which don't end on their own.

    They are cancelled when the process has ended. If one fails, the process is stopped,
    and the error is raised once it has drained.
    """
    tasks = [asyncio.create_task(start()) for start in background]
    for task in tasks:
        task.add_done_callback(lambda it: None if it.cancelled() else stop())
    try:
        await process()
    finally:
        failed = [task for task in tasks if task.done()]
        await end(tasks)
    for task in failed:
        task.result()


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end; unwrap an `OutboxError` from a task group's error.

    Raises:
        OutboxError: the first one that the tasks raised.
    """
    try:
        return asyncio.run(coroutine)
    except BaseExceptionGroup as group:
        first = next(leaves_of(group))
        if isinstance(first, OutboxError):
            raise first from group
        raise
