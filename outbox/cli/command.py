"""What the three commands share: their options, and one line for each failure."""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from outbox.cli.table import printable
from outbox.errors import ConfigError, OutboxError
from outbox.observability.endpoints import FORMS, Endpoints
from outbox.observability.health import Health
from outbox.observability.heartbeat import Heartbeat
from outbox.observability.logging import PrintableFormatter
from outbox.observability.watchdog import Watchdog

if TYPE_CHECKING:
    from outbox.observability.prometheus import PrometheusEvents

DATABASE_VARIABLE: Final = "PILLARBOX_DATABASE_URL"
BROKER_VARIABLE: Final = "PILLARBOX_BROKER_URL"
FAILED: Final = 2
MEASURE_SECONDS: Final = 60.0

Subcommands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class Stoppable(Protocol):
    """A process of ours that runs until it is stopped."""

    def stop(self) -> None:
        """Ask it to finish what it is doing."""

    async def run(self) -> None:
        """Run until then."""


def command(name: str, description: str | None) -> argparse.ArgumentParser:
    """Make the parser of a command with the options that all have."""
    parser = argparse.ArgumentParser(prog=name, description=description)
    parser.add_argument(
        "--log-level",
        default="info",
        choices=["debug", "info", "warning", "error"],
        help="how much to log to standard error (default: %(default)s)",
    )
    return parser


def add_database(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the database."""
    parser.add_argument(
        "--database",
        metavar="URL",
        help=f"postgresql://user@host:port/name (default: ${DATABASE_VARIABLE})",
    )


def add_watching(parser: argparse.ArgumentParser) -> None:
    """Add the options for who watches a process."""
    parser.add_argument(
        "--health-listen",
        metavar="ADDRESS",
        help="answer GET /live and /ready on this address, and `inbox run` also "
        f"/blocked: {FORMS} (default: nowhere)",
    )
    parser.add_argument(
        "--metrics-listen",
        metavar="ADDRESS",
        help=f"serve metrics for Prometheus on this address: {FORMS}; it may be that "
        "of --health-listen (default: nowhere)",
    )
    parser.add_argument(
        "--metrics-interval",
        type=float,
        default=MEASURE_SECONDS,
        metavar="SECONDS",
        help="how often dead letters are counted for the metrics (default: "
        "%(default)g)",
    )
    parser.add_argument(
        "--watchdog",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="exit with status 70 when the event loop has been stuck for so long; "
        "0: never (default: %(default)g)",
    )


def metrics_of(options: argparse.Namespace) -> "PrometheusEvents | None":
    """Make the observer that feeds the metrics; None if they are served nowhere.

    Args:
        options: those of `add_watching`.

    Raises:
        ConfigError: the interval can't be used, or the extra is missing.
    """
    if options.metrics_listen is None:
        return None
    if not options.metrics_interval > 0:
        raise ConfigError(
            f"metrics-interval={options.metrics_interval:g}: must be above 0"
        )
    try:
        from outbox.observability.prometheus import PrometheusEvents
    except ImportError as error:
        raise ConfigError(
            f"metrics-listen={options.metrics_listen}: {error}; "
            "pip install 'pillarbox[metrics]'"
        ) from error
    return PrometheusEvents()


def url_of(value: str | None, option: str, variable: str) -> str:
    """Take a URL from its option, its variable, or the file that `…_FILE` names.

    Raises:
        ConfigError: none is there, or the file can't be read.
    """
    url = value or os.environ.get(variable) or _read(f"{variable}_FILE")
    if not url:
        raise ConfigError(
            f"no {option} given: use --{option} URL, set {variable}, or let "
            f"{variable}_FILE name a file with it"
        )
    return url


def _read(variable: str) -> str | None:
    path = os.environ.get(variable)
    if not path:
        return None
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{variable}={path}: {error}; let it name a text file that holds a URL "
            "and that this user may read"
        ) from error


def main(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], int],
    argv: Sequence[str] | None,
) -> int:
    """Parse, run, and turn what we raise on purpose into one line and status 2."""
    arguments = parser.parse_args(argv)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=arguments.log_level.upper(), handlers=[handler])
    try:
        return run(arguments)
    except OutboxError as error:
        said = printable(" ".join(str(error).split()))
        sys.stderr.write(f"{parser.prog}: {said}\n")
        return FAILED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def run_until_stopped(
    process: Stoppable,
    options: argparse.Namespace,
    health: Health,
    metrics: "PrometheusEvents | None" = None,
) -> int:
    """Run a process; SIGTERM or SIGINT drains it, a second one ends it at once.

    Args:
        options: those of `add_watching`.
        health: an observer of the process.
        metrics: another one.
    """
    watchdog = Watchdog(options.watchdog) if options.watchdog else None
    endpoints = Endpoints()
    endpoints.add("health", options.health_listen, health)
    if metrics is not None:
        endpoints.add("metrics", options.metrics_listen, metrics)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, number)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(Heartbeat.from_environment().beating())
            if watchdog is not None:
                await stack.enter_async_context(watchdog.watching())
            await stack.enter_async_context(endpoints.served())
            await process.run()

    def stop(number: int) -> None:
        health.stopping()
        process.stop()
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)

    return run_coroutine(run())


def run_coroutine(coroutine: Coroutine[Any, Any, None]) -> int:
    """Run to the end; what a task group wrapped around our own error is taken off.

    Raises:
        OutboxError: the first of those that the tasks raised.
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
