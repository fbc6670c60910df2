"""`inbox run`: the consumer as a process."""

import argparse
import logging
import os
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Final

from inbox.consumer import Consumer
from inbox.consuming.blocked_keys import BlockedKeys
from inbox.events import (
    ConsumerStarted,
    DatabaseFound,
    DatabaseLost,
    MessageDeadLettered,
    SourceFound,
    SourceLost,
)
from outbox.cli.command import (
    Subcommands,
    add_watching,
    metrics_of,
    run_until_stopped,
)
from outbox.cli.dead_letter_options import add_schedule, schedule_of
from outbox.cli.supervisor import Beside, Side
from outbox.dead_letters import RetrySchedule, Scheduler
from outbox.dead_letters.measure import Measure
from outbox.errors import ConfigError, one_line
from outbox.events import Event, Observer, Observers
from outbox.import_path import import_object, where
from outbox.observability.health import Health
from outbox.observability.logging import LogEvents

GAVE_UP: Final = 1
_IDLE: Final = 5.0
_LAST_WAIT: Final = 1.0


def add_to(subcommands: Subcommands) -> None:
    """Add the command to the parser."""
    parser = subcommands.add_parser("run", help="handle messages until SIGTERM")
    parser.add_argument(
        "consumer",
        metavar="MODULE:NAME",
        help="where the Consumer is, or a function that gives one",
    )
    parser.add_argument(
        "--queue",
        action="append",
        default=[],
        metavar="NAME=WEIGHT",
        help="serve this queue, and only those named so; may be repeated (by default "
        "all of the consumer's, with its weights)",
    )
    parser.add_argument(
        "--once",
        type=float,
        nargs="?",
        const=_IDLE,
        metavar="SECONDS",
        help="handle what is there, and exit when nothing has come for so long "
        "(%(const)g if not given): with 0, or with 1 if something became a dead letter",
    )
    add_schedule(parser)
    add_watching(parser)
    parser.add_argument(
        "--show-blocked-keys",
        action="store_true",
        help="name the keys in /blocked, not only their number: anyone who reaches "
        "the port can read them",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    sys.path.insert(0, "")  # as `python -m` does: the user's modules are there
    queues = queues_of(arguments.queue)
    consumer = load_consumer(arguments.consumer)
    if queues:
        consumer.serve(queues)
    blocked = BlockedKeys(consumer.name)
    health = Health(
        ConsumerStarted,
        {SourceLost: SourceFound, DatabaseLost: DatabaseFound},
        {"/blocked": blocked.tell if arguments.show_blocked_keys else blocked.count},
    )
    metrics = metrics_of(arguments)
    notify = Observers(
        [LogEvents()] if metrics is None else [LogEvents(), metrics]
    ).notify
    consumer.observe(notify)
    consumer.observe(health)
    consumer.observe(blocked)
    process = Once(consumer, arguments.once)
    sides: list[Side] = []
    schedule = schedule_of(arguments)
    if schedule is not None:
        sides.append(scheduler_of(consumer, schedule, notify).run)
    if metrics is not None:
        measure = Measure(
            consumer.retrier,
            schema="inbox",
            origin=f"consumer:{consumer.name}",
            seconds=arguments.metrics_interval,
            notify=notify,
        )
        sides.append(measure.run)
        sides.append(partial(blocked.measure, arguments.metrics_interval, notify))
    status = run_until_stopped(Beside(process, sides), arguments, health, metrics)
    if arguments.once is not None and process.gave_up:
        status = GAVE_UP
    _leave_stuck_handlers(consumer.name, status)
    return status


def scheduler_of(
    consumer: Consumer, schedule: RetrySchedule, notify: Observer
) -> Scheduler:
    """Make what retries a consumer's dead letters by the clock."""
    return Scheduler(
        partial(consumer.retrier, schedule, notify),
        schedule,
        schema="inbox",
        origin=f"consumer:{consumer.name}",
        notify=notify,
    )


class Once:
    """Runs a consumer until it is stopped, or idle for some seconds if any are given.

    Attributes:
        gave_up: whether a message became a dead letter.
    """

    def __init__(self, consumer: Consumer, seconds: float | None) -> None:
        if seconds is not None and not 0 < seconds < threading.TIMEOUT_MAX:
            raise ConfigError(f"once={seconds:g}: must be a positive number of seconds")
        self.gave_up = False
        self._consumer = consumer
        self._idle = None if seconds is None else timedelta(seconds=seconds)
        consumer.observe(self._watch)

    def stop(self) -> None:
        """Stop the consumer."""
        self._consumer.stop()

    async def run(self) -> None:
        """Run it."""
        await self._consumer.run(idle=self._idle)

    def _watch(self, event: Event) -> None:
        self.gave_up = self.gave_up or isinstance(event, MessageDeadLettered)


def queues_of(options: Sequence[str]) -> dict[str, int]:
    """Read `NAME=WEIGHT`, or `NAME` for a weight of 1.

    Raises:
        ConfigError: a weight is no whole number, or a name comes twice.
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
                f"--queue {option}: weight {weight!r} is no whole number; write "
                "NAME=WEIGHT, e.g. realtime=2"
            ) from None
    return queues


def load_consumer(path: str) -> Consumer:
    """Import the consumer that `module:name` names.

    Raises:
        ConfigError: as `import_object`, or it is no consumer and gives none.
    """
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


def _leave_stuck_handlers(consumer: str, status: int) -> None:
    """Exit in spite of threads that did not end; the server rolls them back."""
    threads = [
        t for t in threading.enumerate() if t.name.startswith(f"inbox {consumer}")
    ]
    for thread in threads:
        thread.join(_LAST_WAIT / len(threads))
    stuck = sum(thread.is_alive() for thread in threads)
    if stuck:
        logging.getLogger("pillarbox").warning(
            "%d handlers did not end in time; their transactions are rolled back", stuck
        )
        logging.shutdown()
        os._exit(status)
