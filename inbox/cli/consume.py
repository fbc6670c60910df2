"""`pillarbox consume`: runs a consumer as a process."""

import logging
import os
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Annotated, Final

import typer

from inbox.consumer import Consumer
from inbox.consuming.activity import ConsumerCounts
from inbox.consuming.blocked_keys import BlockedKeys
from inbox.events import (
    ConsumerStarted,
    DeliveryLanesFree,
    DeliveryLanesWithheld,
    HandlerDatabaseLost,
    HandlerDatabaseRecovered,
    HandlersAbandoned,
    MessageDeadLettered,
    SourceLost,
    SourceRecovered,
)
from outbox.cli.command import Duration, command, duration_option, new_app
from outbox.cli.supervisor import Background, Schedule, Watching, run_until_stopped
from outbox.dead_letters import RetrySchedule, Scheduler
from outbox.dead_letters.measure import Measure
from outbox.errors import ConfigError, one_line
from outbox.events import Event, Observer, Observers
from outbox.import_path import import_object, where
from outbox.observability.activity import Activity
from outbox.observability.database_measure import CONSUMER, DatabaseMeasure
from outbox.observability.health import Health
from outbox.observability.logging import LogEvents

GAVE_UP: Final = 1
"""The exit status with `--once` when a message was dead-lettered."""
_LAST_WAIT: Final = 1.0

app = new_app()


@command(
    app,
    epilog="Exit status: 0 stopped, or nothing was left to do; 1 with --once, if a "
    "message became a dead letter; 2 it could not run; 70 the watchdog ended it.",
)
def consume(
    consumer: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:NAME",
            envvar="PILLARBOX_CONSUME_CONSUMER",
            help="Where the Consumer is, or a function that returns one.",
            show_default=False,
        ),
    ],
    *,
    queue: Annotated[
        list[str] | None,
        typer.Option(
            "--queue",
            metavar="NAME=WEIGHT",
            help="Serve only these queues; may be repeated.",
            show_default="all, with the consumer's weights",
        ),
    ] = None,
    once: Annotated[
        bool,
        typer.Option("--once", help="Handle the waiting messages and exit when idle."),
    ] = False,
    idle: Annotated[
        timedelta,
        duration_option(
            "--idle",
            help="With --once: exit when no message has arrived for this long.",
        ),
    ] = Duration(seconds=5),
    show_blocked_keys: Annotated[
        bool,
        typer.Option(
            "--show-blocked-keys",
            help="Name the keys in /blocked, not only their number. Anyone who reaches "
            "the port can read them.",
        ),
    ] = False,
    schedule: Schedule,
    watching: Watching,
) -> int:
    """Handle messages with your Consumer until SIGTERM; then drain and exit."""
    queues = queues_of(queue or ())
    found = load_consumer(consumer)
    if queues:
        found.serve(queues)
    process = Once(found, idle.total_seconds() if once else None)
    status = _run(
        found,
        process,
        schedule.read(),
        watching,
        show_blocked_keys=show_blocked_keys,
    )
    if once and process.gave_up:
        status = GAVE_UP
    _leave_stuck_handlers(found.name, status, found.notify)
    return status


def _run(
    consumer: Consumer,
    process: "Once",
    schedule: RetrySchedule | None,
    watching: Watching,
    *,
    show_blocked_keys: bool,
) -> int:
    blocked = BlockedKeys(consumer.name)
    health = Health(
        ConsumerStarted,
        {
            SourceLost: SourceRecovered,
            HandlerDatabaseLost: HandlerDatabaseRecovered,
            DeliveryLanesWithheld: DeliveryLanesFree,
        },
        {"/blocked": blocked.tell if show_blocked_keys else blocked.count},
    )
    counts = ConsumerCounts(consumer.name)
    metrics = watching.metrics()
    observers: list[Observer] = [LogEvents()]
    if metrics is not None:
        from inbox.consuming.metrics import ConsumerMetrics
        from outbox.observability.prometheus import DatabaseMetrics

        observers += [
            metrics,
            ConsumerMetrics(metrics.registry, metrics.topics, counts),
            DatabaseMetrics(metrics.registry),
        ]
    notify = Observers(observers).notify
    everybody: list[Observer] = [*observers, health, blocked, counts]
    for observer in everybody:
        consumer.observe(observer)
    background: list[Background] = [Activity(counts, watching.log_interval, notify).run]
    if schedule is not None:
        background.append(scheduler_of(consumer, schedule, notify).run)
    if metrics is not None:
        seconds = watching.metrics_interval.total_seconds()
        measure = Measure(
            consumer.retrier,
            schema="inbox",
            origin=f"consumer:{consumer.name}",
            seconds=seconds,
            notify=notify,
        )
        database = DatabaseMeasure(
            consumer.database_url,
            seconds=seconds,
            notify=notify,
            measurer=CONSUMER,
        )
        background += [measure.run, database.run]
        background.append(partial(blocked.measure, seconds, notify))
    return run_until_stopped(process, background, watching, health, metrics)


def scheduler_of(
    consumer: Consumer, schedule: RetrySchedule, notify: Observer
) -> Scheduler:
    """Create the scheduler that retries a consumer's dead letters."""
    return Scheduler(
        partial(consumer.retrier, schedule, notify),
        schedule,
        schema="inbox",
        origin=f"consumer:{consumer.name}",
        notify=notify,
    )


class Once:
    """Runs a consumer until it is stopped or, with `seconds`, has been idle that long.

    Attributes:
        gave_up: whether a message was dead-lettered.
    """

    def __init__(self, consumer: Consumer, seconds: float | None) -> None:
        if seconds is not None and not 0 < seconds < threading.TIMEOUT_MAX:
            raise ConfigError(f"idle={seconds:g}s: must be above 0s and finite")
        self.gave_up = False
        self._consumer = consumer
        self._idle = None if seconds is None else timedelta(seconds=seconds)
        consumer.observe(self._watch)

    def stop(self) -> None:
        """Stop the consumer."""
        self._consumer.stop()

    async def run(self) -> None:
        """Run the consumer."""
        await self._consumer.run(idle=self._idle)

    def _watch(self, event: Event) -> None:
        self.gave_up = self.gave_up or isinstance(event, MessageDeadLettered)


def queues_of(options: Sequence[str]) -> dict[str, int]:
    """Parse `NAME=WEIGHT`, or `NAME` for a weight of 1.

    Raises:
        ConfigError: a weight isn't a whole number, or a name is repeated.
    """
    queues: dict[str, int] = {}
    for option in options:
        name, separator, weight = option.partition("=")
        if name in queues:
            raise ConfigError(f"--queue {option}: {name!r} was named before")
        try:
            queues[name] = int(weight) if separator else 1
        except ValueError:
            raise ConfigError(
                f"--queue {option}: weight {weight!r} is not a whole number; "
                "write NAME=WEIGHT, e.g. realtime=2"
            ) from None
    return queues


def load_consumer(path: str) -> Consumer:
    """Import the consumer `module:name`, also from the working directory.

    Raises:
        ConfigError: as `import_object`, or it is neither a consumer nor a function that
            returns one.
    """
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does, to find the user's modules
    found = import_object("consumer", path)
    if callable(found) and not isinstance(found, Consumer):
        try:
            found = found()
        except Exception as error:
            raise ConfigError(
                f"consumer {path!r}: {path.partition(':')[2]!r} raised "
                f"{one_line(error)} ({where(error)})"
            ) from error
    if not isinstance(found, Consumer):
        raise ConfigError(
            f"consumer {path!r}: is a {type(found).__name__}, and should be an "
            "inbox.Consumer, or a function that returns one"
        )
    return found


def _leave_stuck_handlers(consumer: str, status: int, notify: Observer) -> None:
    """Exit although handler threads still run; the server rolls back their work."""
    threads = [
        t for t in threading.enumerate() if t.name.startswith(f"inbox {consumer}")
    ]
    for thread in threads:
        thread.join(_LAST_WAIT / len(threads))
    stuck = sum(thread.is_alive() for thread in threads)
    if stuck:
        notify(HandlersAbandoned(consumer=consumer, handlers=stuck))
        logging.shutdown()
        os._exit(status)
