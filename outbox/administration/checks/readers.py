"""The readers: which of them is behind, and what nobody reads."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

from outbox.administration.check import Finding, Installation, warning
from outbox.administration.connection import AdministrationConnection
from outbox.administration.readers import count_of, held_by, list_readers
from outbox.logs.printable import for_shell
from outbox.postgres.sql_files import load

_BEHIND: Final = timedelta(days=1)


def check_readers(
    connection: AdministrationConnection, _here: Installation
) -> Iterator[Finding]:
    """Find readers that are behind, and messages that no reader gets."""
    for reader in list_readers(connection):
        if reader.dropped_at is not None or reader.discards:
            continue
        if reader.oldest is not None and datetime.now(UTC) - reader.oldest > _BEHIND:
            relay = f"relay --reader {for_shell(reader.reader)}"
            start = "consume MODULE:NAME" if reader.is_consumer else relay
            yield warning(
                f"reader {reader.reader} has not {reader.settled_as}"
                f" {count_of(reader)}, the oldest of {reader.oldest:%F %R%z}, and holds"
                f" back {held_by(reader)}",
                f"pillarbox {start}"
                "  # or, if it is not needed any more, pillarbox readers drop",
            )
    for messages, topics in connection.execute(load("outbox", "find_unrouted")):
        if messages:
            yield warning(
                f"no reader gets {messages} messages of {', '.join(topics)}:"
                " their days are kept",
                "pillarbox readers add NAME --topic TOPIC --from-oldest"
                "  # or with --discard",
            )
