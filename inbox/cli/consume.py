"""`pillarbox consume`: runs a consumer as a process."""

import logging
import os
import threading
from datetime import timedelta
from functools import partial
from typing import Annotated, Final

import typer

from inbox.consumer import Consumer
from inbox.consuming.activity import ConsumerCounts
from inbox.consuming.load import load_consumer, queues_of
from inbox.events import ConsumerStarted, HandlersAbandoned, MessageDeadLettered
from outbox.cli.command import command, new_app
from outbox.cli.supervisor import (
    Background,
    Schedule,
    Watching,
    run_until_stopped,
)
from outbox.dead_letters import RetrySchedule, Scheduler
from outbox.events import Event, Observer, Observers
from outbox.observability.activity import Activity
from outbox.observability.database_measure import CONSUMER, DatabaseMeasure
from outbox.observability.health import Health
from outbox.observability.logging import LogEvents

GAVE_UP: Final = 1
"""The exit status with `--once` when a message was dead-lettered."""
_LAST_WAIT: Final = 1.0
IDLE: Final = timedelta(seconds=5)
"""Longer than a broker takes to deliver what waits, also after a rebalance."""

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
        typer.Option(
            "--once",
            help="Exit when no message has arrived for 5 seconds.",
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
    process = Once(found, IDLE if once else None)
    status = _run(found, process, schedule.read(), watching)
    if once and process.dead_lettered:
        status = GAVE_UP
    _leave_stuck_handlers(found.name, status, found.notify)
    return status


def _run(
    consumer: Consumer,
    process: "Once",
    schedule: RetrySchedule | None,
    watching: Watching,
) -> int:
    health = Health(ConsumerStarted)
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
    everybody: list[Observer] = [*observers, health, counts]
    for observer in everybody:
        consumer.observe(observer)
    background: list[Background] = [Activity(counts, watching.log_interval, notify).run]
    if schedule is not None:
        background.append(scheduler_of(consumer, schedule, notify).run)
    if metrics is not None:
        measure = DatabaseMeasure(
            consumer.database_url,
            CONSUMER,
            seconds=watching.metrics_interval.total_seconds(),
            notify=notify,
        )
        background.append(measure.run)
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
    """Runs a consumer until it is stopped or, with `idle`, has been idle that long.

    Attributes:
        dead_lettered: whether a message was dead-lettered.
    """

    def __init__(self, consumer: Consumer, idle: timedelta | None) -> None:
        self.dead_lettered = False
        self._consumer = consumer
        self._idle = idle
        consumer.observe(self._watch)

    def stop(self) -> None:
        """Stop the consumer."""
        self._consumer.stop()

    async def run(self) -> None:
        """Run the consumer."""
        await self._consumer.run(idle=self._idle)

    def _watch(self, event: Event) -> None:
        self.dead_lettered |= isinstance(event, MessageDeadLettered)


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
