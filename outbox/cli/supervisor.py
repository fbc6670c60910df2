"""Run a relay, a consumer or a similar process, with background tasks."""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Final,
    Protocol,
    TypeAlias,
)

import typer

from outbox.cli.command import Duration, duration_option
from outbox.dead_letters.schedule import RetrySchedule
from outbox.errors import ConfigError, OutboxError
from outbox.gather import end
from outbox.observability.endpoints import FORMS, listening
from outbox.observability.health import Health
from outbox.observability.heartbeat import Heartbeat
from outbox.observability.watchdog import Watchdog

if TYPE_CHECKING:
    from outbox.observability.prometheus import PrometheusEvents

Background: TypeAlias = Callable[[], Coroutine[Any, Any, None]]

_WATCHING: Final = "Watching"
_SCHEDULE: Final = "Dead letters"
_DEFAULT: Final = RetrySchedule()


class Stoppable(Protocol):
    """A process that runs until it is stopped."""

    def stop(self) -> None:
        """Ask it to finish its current work and stop."""

    async def run(self) -> None:
        """Run until it is stopped."""


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
            "--listen",
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
            "--watchdog",
            help="Exit with status 70 if the event loop is blocked for this long; 0s: "
            "never.",
            panel=_WATCHING,
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
            from outbox.observability.prometheus import PrometheusEvents
        except ImportError as error:
            raise ConfigError(
                f"listen={self.listen}: {error}; pip install 'pillarbox[cli]'"
            ) from error
        return PrometheusEvents()


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The options for scheduled retries of dead letters."""

    dead_letter_interval: Annotated[
        timedelta,
        duration_option(
            "--dead-letter-interval",
            envvar="PILLARBOX_DEAD_LETTER_INTERVAL",
            help="How often dead letters that are due are retried; 0s: never.",
            panel=_SCHEDULE,
        ),
    ] = Duration.of(_DEFAULT.interval)

    def read(self) -> RetrySchedule | None:
        """Return the schedule; None for an interval of 0.

        Raises:
            ConfigError: a value is invalid.
        """
        if not self.dead_letter_interval:
            return None
        return RetrySchedule(interval=self.dead_letter_interval)


class Supervisor:
    """Runs a process with background tasks, which don't end on their own.

    They are cancelled when the process has ended. If one fails, the process is stopped,
    and the error is raised once it has drained.
    """

    def __init__(self, process: Stoppable, background: Sequence[Background]) -> None:
        self._process = process
        self._background = background

    def stop(self) -> None:
        """Stop the process."""
        self._process.stop()

    async def run(self) -> None:
        """Run the process until it ends."""
        tasks = [asyncio.create_task(start()) for start in self._background]
        for task in tasks:
            task.add_done_callback(self._on_end)
        try:
            await self._process.run()
        finally:
            failed = [task for task in tasks if task.done()]
            await end(tasks)
        for task in failed:
            task.result()

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self.stop()


def run_until_stopped(
    process: Stoppable,
    background: Sequence[Background],
    watching: Watching,
    health: Health,
    metrics: "PrometheusEvents | None" = None,
) -> int:
    """Run a process; SIGTERM or SIGINT drains it, a second one ends it at once.

    Args:
        background: run as long as the process does.
        health: an observer of the process.
        metrics: another observer of the process.
    """
    supervisor = Supervisor(process, background)
    limit = watching.watchdog.total_seconds()
    watchdog = Watchdog(limit) if limit else None
    served = {**health.handlers(), **(metrics.handlers() if metrics else {})}

    async def run() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, number)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(Heartbeat.from_environment().beating())
            if watchdog is not None:
                await stack.enter_async_context(watchdog.watching())
            if watching.listen is not None:
                await stack.enter_async_context(listening(watching.listen, served))
            await supervisor.run()

    def stop(number: int) -> None:
        health.stopping()
        process.stop()
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)

    return run_coroutine(run())


def run_coroutine(coroutine: Coroutine[Any, Any, None]) -> int:
    """Run a coroutine to its end; unwrap an `OutboxError` from a task group's error.

    Raises:
        OutboxError: the first one that the tasks raised.
    """
    try:
        asyncio.run(coroutine)
    except BaseExceptionGroup as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        if isinstance(first, OutboxError):
            raise first from group
        raise
    return 0
