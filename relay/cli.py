"""`relay`: publish what committed."""

import argparse
from collections.abc import Sequence
from datetime import timedelta

from outbox.command import (
    BROKER_VARIABLE,
    DATABASE_VARIABLE,
    add_database,
    command,
    run_until_stopped,
    url_of,
)
from outbox.command import main as run_command
from outbox.entry_points import implementation
from outbox.observers.logging import LogEvents
from outbox.payload_codec import load_codec
from outbox.retry import RetryPolicy
from relay.config import RelayConfig
from relay.relay import Relay


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; give its exit status."""
    parser = command("relay", __doc__)
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(subcommands.add_parser("run", help="publish until SIGTERM, then drain"))
    return run_command(parser, lambda arguments: arguments.run(arguments), argv)


def _add_run(parser: argparse.ArgumentParser) -> None:
    default = RelayConfig()
    add_database(parser)
    parser.add_argument(
        "--broker",
        metavar="URL",
        help=f"where to publish to, e.g. redis://host (default: ${BROKER_VARIABLE})",
    )
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
    for name, meaning in (
        ("lease", "how long a relay that hangs keeps its lanes"),
        ("poll-interval", "how often to look without being woken"),
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
        "--codec",
        metavar="MODULE:NAME",
        help="decode what was added with this codec before it is published",
    )
    parser.add_argument(
        "--strict-order",
        action="store_true",
        help="publish one message of a key at a time",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    database = url_of(arguments.database, "database", DATABASE_VARIABLE)
    broker = url_of(arguments.broker, "broker", BROKER_VARIABLE)
    config = RelayConfig(
        batch_size=arguments.batch_size,
        concurrency=arguments.concurrency,
        lease=timedelta(seconds=arguments.lease),
        poll_interval=timedelta(seconds=arguments.poll_interval),
        publish_timeout=timedelta(seconds=arguments.publish_timeout),
        drain=timedelta(seconds=arguments.drain),
        strict_order=arguments.strict_order,
        retry=RetryPolicy(max_attempts=arguments.max_attempts),
        codec=load_codec(arguments.codec) if arguments.codec else None,
    )
    publisher = implementation("relay.publishers", broker).from_url(broker)
    return run_until_stopped(
        Relay(
            database,
            publisher,
            config,
            observers=[LogEvents()],
            name=broker.partition(":")[0],
        )
    )
