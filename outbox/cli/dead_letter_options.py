"""The options that say which dead letters are meant."""

import argparse

from outbox.dead_letters.criteria import Criteria
from outbox.dead_letters.letter import Status
from outbox.dead_letters.schedule import RetrySchedule
from outbox.duration import read_duration
from outbox.errors import ConfigError

_ANY = "any"


def add_criteria(
    parser: argparse.ArgumentParser, *, status: Status | None, max_rows: int | None
) -> None:
    """Add the filters, with the defaults of this command."""
    for name, meaning in (
        ("topic", "of this topic, or of topics that begin so: 'orders.*'"),
        ("key", "with this key"),
        ("tenant", "of this tenant"),
        ("origin", "given up by it: publisher:redis, consumer:billing"),
        ("message", "of the message with this id"),
        ("error", "with this text in their reason"),
    ):
        parser.add_argument(f"--{name}", metavar=name.upper(), help=meaning)
    for name, meaning in (
        ("newer-than", "given up at most so long ago: 90s, 15m, 6h, 7d"),
        ("older-than", "given up at least so long ago"),
    ):
        parser.add_argument(f"--{name}", metavar="AGE", help=meaning)
    if status is None or max_rows is not None:
        parser.add_argument(
            "--status",
            type=str.upper,
            choices=[*Status, _ANY.upper()],
            default=status or _ANY.upper(),
            help="(default: %(default)s)",
        )
    parser.add_argument(
        "--limit",
        type=int,
        default=max_rows,
        metavar="N",
        help="at most so many (default: %(default)s)"
        if max_rows
        else "at most so many",
    )


def criteria_of(arguments: argparse.Namespace) -> Criteria:
    """Read the filters.

    Raises:
        ConfigError: one of them can't be used.
    """
    if arguments.limit is not None and arguments.limit < 1:
        raise ConfigError(f"--limit {arguments.limit}: must be at least 1")
    status = getattr(arguments, "status", Status.PENDING)
    ages = {
        name: None if text is None else read_duration(f"--{option}", text)
        for name, option, text in (
            ("newer_than", "newer-than", arguments.newer_than),
            ("older_than", "older-than", arguments.older_than),
        )
    }
    return Criteria(
        status=None if status == _ANY.upper() else Status(status),
        topic=arguments.topic,
        key=arguments.key,
        tenant=arguments.tenant,
        origin=arguments.origin,
        message_id=arguments.message,
        error=arguments.error,
        max_rows=arguments.limit,
        **ages,
    )


def add_schedule(parser: argparse.ArgumentParser) -> None:
    """Add the options of the schedule."""
    default = RetrySchedule()
    parser.add_argument(
        "--dead-letter-interval",
        default=f"{default.interval.total_seconds() / 3600:g}h",
        metavar="DURATION",
        help="from one turn to retry them to the next; 0s: no turns "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--dead-letter-batch",
        type=int,
        default=default.batch,
        metavar="N",
        help="retries in one turn (default: %(default)s)",
    )
    parser.add_argument(
        "--dead-letter-retries",
        type=int,
        default=default.max_retries,
        metavar="N",
        help="of one dead letter, after them only by hand (default: %(default)s)",
    )


def schedule_of(arguments: argparse.Namespace) -> RetrySchedule | None:
    """Read the schedule; None if there is to be none.

    Raises:
        ConfigError: a value can't be used.
    """
    interval = read_duration("--dead-letter-interval", arguments.dead_letter_interval)
    if not interval:
        return None
    return RetrySchedule(
        interval=interval,
        batch=arguments.dead_letter_batch,
        max_retries=arguments.dead_letter_retries,
    )
