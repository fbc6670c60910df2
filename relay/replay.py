"""`relay replay`: have messages that were published published once more."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from psycopg.rows import class_row

from outbox.administration.connection import AdministrationConnection, administration
from outbox.cli.command import DATABASE_VARIABLE, Subcommands, add_database, url_of
from outbox.cli.progress import Progress
from outbox.cli.table import draw_table
from outbox.duration import read_duration, read_rate
from outbox.errors import ConfigError
from outbox.postgres.sql_files import load

_COLUMNS: Final = ("topic", "messages", "oldest", "newest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which of the published messages are meant; None stands for anything.

    Attributes:
        since: added then or later; with `until` it bounds the days that are read.
        until: added before.
        topic: a topic, or the beginning of topics followed by `*`.
        max_rows: so many of them, the oldest first.
    """

    since: datetime
    until: datetime
    topic: str | None = None
    key: str | None = None
    tenant: str | None = None
    max_rows: int | None = None

    def __post_init__(self) -> None:
        """Refuse what can't be found."""
        for name, moment in (("since", self.since), ("until", self.until)):
            if moment.tzinfo is None:
                raise ConfigError(
                    f"{name}={moment}: name its time zone, e.g. {moment}Z"
                )
        if self.since >= self.until:
            raise ConfigError(f"since={self.since}: must be before until={self.until}")
        if self.max_rows is not None and self.max_rows < 1:
            raise ConfigError(f"max_rows={self.max_rows}: must be at least 1")

    def parameters(self) -> dict[str, Any]:
        """Give the parameters of the statements that count and find."""
        many = self.topic is not None and self.topic.endswith("*")
        return {
            "since": self.since,
            "until": self.until,
            "topic": None if many else self.topic,
            "topic_prefix": self.topic[:-1] if many and self.topic else None,
            "key": self.key,
            "tenant": self.tenant,
            "max_rows": self.max_rows,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """How many messages of a topic were published, and when they were added."""

    topic: str
    messages: int
    oldest: datetime
    newest: datetime


def count_published(
    connection: AdministrationConnection, choice: Choice
) -> list[Published]:
    """Count what is meant, by topic; `max_rows` doesn't matter here."""
    with connection.cursor(row_factory=class_row(Published)) as cursor:
        return cursor.execute(
            load("relay", "count_published"), choice.parameters()
        ).fetchall()


def replay_published(
    connection: AdministrationConnection,
    choice: Choice,
    *,
    batch_size: int = 1000,
    max_per_second: float | None = None,
    on_batch: Callable[[int], None] = lambda _: None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Make messages ready once more, with the ids that they have; give how many.

    Each batch is a transaction of its own and visible before the next one, in the
    order in which the messages were added: so a relay that is at work meanwhile
    keeps the order of each key.

    Args:
        connection: in autocommit mode.
        on_batch: is told how many have been made ready so far.
    """
    replayed = 0
    started = time.monotonic()
    for batch in _batches(connection, choice, batch_size):
        moments = [created_at for _, created_at in batch]
        replayed += connection.execute(
            load("relay", "replay_published"),
            {
                "ids": [id for id, _ in batch],
                "first": min(moments),
                "last": max(moments),
            },
        ).rowcount
        on_batch(replayed)
        if max_per_second is not None:
            sleep(max(0.0, started + replayed / max_per_second - time.monotonic()))
    return replayed


def _batches(
    connection: AdministrationConnection, choice: Choice, size: int
) -> Iterator[Sequence[tuple[UUID, datetime]]]:
    # Held by the server beyond its transaction: neither does our memory grow with the
    # number of messages, nor does a snapshot keep dead rows from being cleaned up.
    with connection.cursor("pillarbox_replay", withhold=True) as cursor:
        cursor.execute(load("relay", "find_published"), choice.parameters())
        while batch := cursor.fetchmany(size):
            yield batch


def add_to(subcommands: Subcommands) -> None:
    """Add the command to the parser."""
    parser = subcommands.add_parser(
        "replay", help="have messages that were published published once more"
    )
    add_database(parser)
    moment = (
        "a moment with its time zone, 2026-01-31T14:00Z, or so long ago: 90s, 6h, 7d"
    )
    for name, meaning, metavar in (
        ("since", f"added then or later: {moment}", "MOMENT"),
        ("until", "added before (default: now)", "MOMENT"),
        ("topic", "of this topic, or of topics that begin so: 'orders.*'", "TOPIC"),
        ("key", "with this key", "KEY"),
        ("tenant", "of this tenant", "TENANT"),
        ("rate", "no faster than that", "N/s"),
    ):
        parser.add_argument(
            f"--{name}", metavar=metavar, help=meaning, required=name == "since"
        )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="at most so many, the oldest first"
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=1000,
        metavar="N",
        help="messages in one transaction (default: %(default)s)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="count which ones, and do nothing"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    choice = _choice(arguments, datetime.now(UTC))
    rate = None if arguments.rate is None else read_rate("--rate", arguments.rate)
    if arguments.batch_size < 1:
        raise ConfigError(f"--batch-size {arguments.batch_size}: must be at least 1")
    with administration(
        url_of(arguments.database, "database", DATABASE_VARIABLE),
        application_name="pillarbox relay replay",
        rights="GRANT pillarbox_relay TO its role",
    ) as connection:
        found = count_published(connection, choice)
        if arguments.dry_run:
            sys.stdout.write(_said(found, as_json=arguments.json))
            return 0
        total = sum(topic.messages for topic in found)
        total = min(total, choice.max_rows or total)
        # No faster than asked for within a second either.
        size = min(arguments.batch_size, max(1, int(rate or arguments.batch_size)))
        progress = Progress(total)
        done = 0

        def show(count: int) -> None:
            nonlocal done
            done = count
            progress.show(min(count, total), {})

        try:
            replayed = replay_published(
                connection, choice, batch_size=size, max_per_second=rate, on_batch=show
            )
        finally:
            progress.end()
            if done < total:
                sys.stderr.write(f"{total - done} of {total} were not replayed\n")
    sys.stdout.write(
        f"{json.dumps({'replayed': replayed})}\n"
        if arguments.json
        else f"{replayed} replayed: ready to be published once more\n"
    )
    return 0


def _choice(arguments: argparse.Namespace, now: datetime) -> Choice:
    if arguments.limit is not None and arguments.limit < 1:
        raise ConfigError(f"--limit {arguments.limit}: must be at least 1")
    return Choice(
        since=_moment("--since", arguments.since, now),
        until=now
        if arguments.until is None
        else _moment("--until", arguments.until, now),
        topic=arguments.topic,
        key=arguments.key,
        tenant=arguments.tenant,
        max_rows=arguments.limit,
    )


def _moment(option: str, text: str, now: datetime) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        try:
            return now - read_duration(option, text)
        except (ConfigError, OverflowError):
            moment = None
    if moment is None or moment.tzinfo is None:
        raise ConfigError(
            f"{option} {text!r}: write a moment with its time zone such as "
            "2026-01-31T14:00Z, or how long ago: 90s, 15m, 6h, 7d or 2w"
        )
    return moment


def _said(found: Sequence[Published], *, as_json: bool) -> str:
    if as_json:
        return f"{json.dumps([asdict(t) for t in found], indent=2, default=str)}\n"
    if not found:
        return "nothing that was published fits\n"
    return draw_table(
        _COLUMNS,
        [
            (
                t.topic,
                t.messages,
                *(f"{m:%Y-%m-%d %H:%M:%S%z}" for m in (t.oldest, t.newest)),
            )
            for t in found
        ],
    )
