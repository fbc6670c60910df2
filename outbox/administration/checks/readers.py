"""The readers: those that lag, and messages that no reader gets."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

from pillarbox.outbox.administration.check import Finding, Installation, hint, warning
from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.administration.readers import (
    count_of,
    find_unrouted,
    held_by,
    list_readers,
)
from pillarbox.outbox.administration.size import write_size
from pillarbox.outbox.logs.printable import count, for_shell

_BEHIND: Final = timedelta(days=1)


def check_readers(
    connection: AdministrationConnection, _here: Installation
) -> Iterator[Finding]:
    """Find readers that are behind."""
    for reader in list_readers(connection):
        if reader.dropped_at is not None or reader.discards:
            continue
        if reader.oldest is not None and datetime.now(UTC) - reader.oldest > _BEHIND:
            name = for_shell(reader.reader)
            relay = f"relay --reader {name}"
            start = "consume MODULE:NAME" if reader.is_consumer else relay
            yield warning(
                f"reader {reader.reader} has a backlog of {count_of(reader)}, the"
                f" oldest from {reader.oldest:%F %R%z}, and keeps {held_by(reader)},"
                " from being dropped",
                f"pillarbox {start}  # or, if it is no longer needed, pillarbox"
                f" readers drop {name}",
            )


def check_unrouted(
    connection: AdministrationConnection,
    _here: Installation,
    *,
    days: int | None = None,
) -> Iterator[Finding]:
    """Find messages that no reader gets, in all days or in the newest ones."""
    found = find_unrouted(connection, days)
    if found is None:
        return
    messages = count(found.messages, "message")
    if not found.is_complete:
        messages = f"at least {messages}"
    since = f"the oldest from {found.oldest:%F %R%z}"
    if found.is_first:
        is_old = datetime.now(UTC) - found.oldest > _BEHIND
        verb = "has" if found.messages == 1 else "have"
        yield (warning if is_old else hint)(
            f"{messages} {verb} no reader yet, {since}",
            "pillarbox relay --broker URL  # or pillarbox consume MODULE:NAME",
        )
        return
    topics = ", ".join(found.topics)
    if found.more:
        topics += f" and {count(found.more, 'topic')} more"
    kept = f"{count(found.days, 'day')}, {write_size(found.bytes)}"
    if not found.is_complete:
        kept = f"at least {kept}"
    words = "".join(f" --topic {for_shell(topic)}" for topic in found.topics)
    yield warning(
        f"no reader gets {messages} of {topics}, {since}; they keep {kept}, from"
        " being dropped",
        "pillarbox readers add NAME --broker URL --from-oldest"
        + words
        + "  # or, to discard them,"
        + " pillarbox readers add ignored --from-oldest --discard"
        + words,
    )
