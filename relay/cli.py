"""`relay`: publish what committed."""

import argparse
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from functools import partial
from typing import cast

from outbox.brokers.plugins import implementation
from outbox.cli.command import (
    BROKER_VARIABLE,
    DATABASE_VARIABLE,
    add_database,
    add_watching,
    command,
    metrics_of,
    run_until_stopped,
    url_of,
)
from outbox.cli.command import main as run_command
from outbox.cli.dead_letter_options import add_schedule, schedule_of
from outbox.cli.dead_letters import Side
from outbox.cli.dead_letters import add_to as add_dead_letters
from outbox.cli.supervisor import Beside
from outbox.dead_letters import Retrier, RetrySchedule, Scheduler, Tally
from outbox.dead_letters.measure import Measure
from outbox.events import Observer, Observers
from outbox.observability.health import Health
from outbox.observability.logging import LogEvents
from outbox.payload_codec import PayloadCodec, load_codec
from outbox.retry import RetryPolicy
from relay.blocked_keys import add_to as add_blocked
from relay.config import RelayConfig
from relay.dead_letters.retry import publishing_retrier
from relay.events import (
    BrokerFound,
    BrokerLost,
    DatabaseFound,
    DatabaseLost,
    LanesFree,
    LanesWithheld,
    RelayStarted,
)
from relay.publisher import Publisher
from relay.relay import Relay
from relay.replay import add_to as add_replay


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; give its exit status."""
    parser = command("relay", __doc__)
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(subcommands.add_parser("run", help="publish until SIGTERM, then drain"))
    add_dead_letters(
        subcommands,
        Side(
            schema="outbox",
            add_retry=_add_retry,
            open_retrier=_open_retrier,
            take_turn=_take_turn,
        ),
    )
    add_blocked(subcommands)
    add_replay(subcommands)
    return run_command(parser, lambda arguments: arguments.run(arguments), argv)


def _add_run(parser: argparse.ArgumentParser) -> None:
    default = RelayConfig()
    add_database(parser)
    _add_broker(parser)
    add_watching(parser)
    parser.add_argument(
        "--batch-size",
        type=int,
        default=default.batch_size,
        metavar="N",
        help="messages in one claim (default: %(default)s)",
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        default=default.concurrency,
        metavar="N",
        help="batches in flight at once (default: %(default)s)",
    )
    parser.add_argument(
        "--max-batch-bytes",
        type=int,
        default=default.max_batch_bytes,
        metavar="N",
        help="bytes in one claim (default: %(default)s)",
    )
    parser.add_argument(
        "--max-payload-bytes",
        type=int,
        default=default.max_payload_bytes,
        metavar="N",
        help="a message with a larger payload becomes a dead letter without being"
        " loaded (default: %(default)s)",
    )
    for name, meaning in (
        ("lease", "how long a relay that hangs keeps its lanes"),
        ("poll-interval", "how often to look without being woken"),
        ("broker-check-interval", "how often to ask the broker for a sign of life"),
        ("publish-timeout", "after that the broker counts as away"),
        ("drain", "how long to wait for what is in flight at the end"),
    ):
        value = getattr(default, name.replace("-", "_")).total_seconds()
        parser.add_argument(
            f"--{name}",
            type=float,
            default=value,
            metavar="SECONDS",
            help=f"{meaning} (default: %(default)g)",
        )
    parser.add_argument(
        "--max-attempts",
        type=int,
        default=default.retry.max_attempts,
        metavar="N",
        help="of one message, before it is a dead letter (default: %(default)s)",
    )
    parser.add_argument(
        "--strict-order",
        action="store_true",
        help="publish one message of a key at a time",
    )
    add_schedule(parser)
    parser.set_defaults(run=_run)


def _add_broker(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--broker",
        metavar="URL",
        help=f"where to publish to, e.g. redis://host (default: ${BROKER_VARIABLE})",
    )
    parser.add_argument(
        "--codec",
        metavar="MODULE:NAME",
        help="decode what was added with this codec before it is published",
    )


def _add_retry(parser: argparse.ArgumentParser) -> None:
    add_database(parser)
    _add_broker(parser)
    add_schedule(parser)


def _run(arguments: argparse.Namespace) -> int:
    database = url_of(arguments.database, "database", DATABASE_VARIABLE)
    broker = url_of(arguments.broker, "broker", BROKER_VARIABLE)
    config = RelayConfig(
        batch_size=arguments.batch_size,
        concurrency=arguments.concurrency,
        max_batch_bytes=arguments.max_batch_bytes,
        max_payload_bytes=arguments.max_payload_bytes,
        lease=timedelta(seconds=arguments.lease),
        poll_interval=timedelta(seconds=arguments.poll_interval),
        broker_check_interval=timedelta(seconds=arguments.broker_check_interval),
        publish_timeout=timedelta(seconds=arguments.publish_timeout),
        drain=timedelta(seconds=arguments.drain),
        strict_order=arguments.strict_order,
        retry=RetryPolicy(max_attempts=arguments.max_attempts),
        codec=_codec(arguments),
    )
    health = Health(
        RelayStarted,
        {
            BrokerLost: BrokerFound,
            DatabaseLost: DatabaseFound,
            LanesWithheld: LanesFree,
        },
    )
    metrics = metrics_of(arguments)
    notify = Observers(
        [LogEvents()] if metrics is None else [LogEvents(), metrics]
    ).notify
    relay = Relay(
        database,
        _make_publisher(broker),
        config,
        observers=[notify, health],
        name=broker.partition(":")[0],
    )
    schedule = schedule_of(arguments)
    sides = [] if schedule is None else [_scheduler(arguments, schedule, notify).run]
    if metrics is not None:
        measure = Measure(
            partial(_open_retrier, arguments),
            schema="outbox",
            origin=None,
            seconds=arguments.metrics_interval,
            notify=notify,
        )
        sides.append(measure.run)
    return run_until_stopped(Beside(relay, sides), arguments, health, metrics)


def _codec(arguments: argparse.Namespace) -> PayloadCodec | None:
    return load_codec(arguments.codec) if arguments.codec else None


def _make_publisher(broker: str) -> Publisher:
    found = implementation("relay.publishers", broker)
    return cast("Publisher", found.from_url(broker))


def _open_retrier(
    arguments: argparse.Namespace, notify: Observer = lambda _: None
) -> AbstractAsyncContextManager[Retrier]:
    broker = url_of(arguments.broker, "broker", BROKER_VARIABLE)
    return publishing_retrier(
        url_of(arguments.database, "database", DATABASE_VARIABLE),
        # A publisher of its own: the relay's may just have a message of the same key.
        partial(_make_publisher, broker),
        config=RelayConfig(codec=_codec(arguments)),
        schedule=schedule_of(arguments),
        notify=notify,
    )


def _scheduler(
    arguments: argparse.Namespace, schedule: RetrySchedule, notify: Observer
) -> Scheduler:
    return Scheduler(
        partial(_open_retrier, arguments, notify),
        schedule,
        schema="outbox",
        origin=None,
        notify=notify,
    )


async def _take_turn(arguments: argparse.Namespace, notify: Observer) -> Tally | None:
    schedule = schedule_of(arguments) or RetrySchedule()
    notify = Observers([LogEvents(), notify]).notify
    return await _scheduler(arguments, schedule, notify).take_turn()
