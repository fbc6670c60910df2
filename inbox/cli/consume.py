"""`pillarbox consume`: runs a consumer as a process."""

import logging
import os
import threading
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

import typer

from pillarbox.inbox.consuming.activity import ConsumerCounts
from pillarbox.inbox.events import ConsumerStarted, MessageDeadLettered
from pillarbox.outbox.cli.command import CHILD_VARIABLE, command, new_app
from pillarbox.outbox.cli.processes import Processes
from pillarbox.outbox.cli.start import Wait
from pillarbox.outbox.cli.supervisor import (
    RETRY_INTERVAL,
    RetryInterval,
    Watched,
    Watching,
    run_coroutine,
    schedule_of,
)
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.events import Event, Observer
from pillarbox.outbox.observability.database_measure import CONSUMER

if TYPE_CHECKING:
    from pillarbox.outbox.observability.prometheus import PrometheusEvents

GAVE_UP: Final = 1
"""The exit status with `--once` when a message was dead-lettered."""
_LAST_WAIT: Final = 1.0
IDLE: Final = timedelta(seconds=5)
"""Longer than a broker takes to deliver waiting messages, also after a rebalance."""

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
            metavar="NAME=WEIGHT",
            help="Serve only these queues; may be repeated.",
            show_default="all, with the consumer's weights",
        ),
    ] = None,
    once: Annotated[
        bool,
        typer.Option(
            "--once",
            help="Exit when no message has arrived for 5 seconds. Without --wait, it "
            "fails if a server is unavailable.",
        ),
    ] = False,
    processes: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Share the work among this many processes on this machine.",
        ),
    ] = 1,
    wait: Wait = None,
    dead_letter_interval: RetryInterval = RETRY_INTERVAL,
    watching: Watching,
) -> int:
    """Handle messages with your Consumer until SIGTERM; then drain and exit."""
    if processes < 1:
        raise ConfigError(f"--processes {processes}: must be at least 1")
    if processes > 1 and CHILD_VARIABLE not in os.environ:
        exported = watching.metrics()
        several = Processes(processes, watching.listen, exported, restarts=not once)
        return run_coroutine(several.run())
    # SQLAlchemy would take up half of the memory of the parent, which doesn't use it.
    from pillarbox.inbox.consuming.load import load_consumer, queues_of

    queues = queues_of(queue or ())
    found = load_consumer(consumer)
    if queues:
        found.serve(queues)
    counts = ConsumerCounts(found.name)
    dead_lettered = False

    def metrics(exported: "PrometheusEvents") -> Observer:
        from pillarbox.inbox.consuming.metrics import ConsumerMetrics

        return ConsumerMetrics(exported.registry, exported.topics, counts)

    def watch(event: Event) -> None:
        nonlocal dead_lettered
        dead_lettered |= isinstance(event, MessageDeadLettered)

    watched = Watched(
        watching,
        wait=timedelta() if once and wait is None else wait,
        started=ConsumerStarted,
        counts=counts,
        metrics=metrics,
        scope=CONSUMER,
        database=found.database_url,
    )
    for observer in (*watched.observers, watch):
        found.observe(observer)
    schedule = schedule_of(dead_letter_interval)
    watched.retry(
        schedule,
        partial(found.retrier, schedule, watched.notify),
        schema="inbox",
        origin=f"consumer:{found.name}",
    )
    run = partial(found.run, idle=IDLE if once else None)
    watched.run(run, found.stop, found.drain)
    status = GAVE_UP if once and dead_lettered else 0
    _leave_stuck_handlers(found.name, status)
    return status


def _leave_stuck_handlers(consumer: str, status: int) -> None:
    """Exit although handler threads still run; the server rolls back their work."""
    threads = [
        t for t in threading.enumerate() if t.name.startswith(f"inbox {consumer}")
    ]
    for thread in threads:
        thread.join(_LAST_WAIT / len(threads))
    if any(thread.is_alive() for thread in threads):
        logging.shutdown()
        os._exit(status)
