"""`pillarbox blocked`: refused messages that wait, and the keys that they block."""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Final

import typer

from outbox.administration.connection import administration
from outbox.administration.sides import Blocked, BlockedCount, load_sides
from outbox.cli.command import (
    Database,
    Json,
    SideOption,
    command,
    database_url,
    new_app,
)
from outbox.cli.output import write_json, write_line, write_table
from outbox.duration import write_duration
from outbox.logs.printable import count

_MAX_REASON: Final = 80
_COLUMNS: Final = (
    "key",
    "age",
    "side",
    "due in",
    "attempts",
    "topic",
    "consumer",
    "message",
    "reason",
)
_NO_KEY: Final = "(none)"

app = new_app()


@command(
    app,
    epilog="Of consumers, those of the postgres broker are listed; those of other "
    "brokers answer GET /blocked on their --health-listen address.",
)
def blocked(
    *,
    side: SideOption = None,
    limit: Annotated[
        int,
        typer.Option(
            "--limit", metavar="N", min=1, help="Maximum number of each side."
        ),
    ] = 50,
    database: Database = None,
    json: Json = False,
) -> None:
    """List refused messages that wait for a retry, and the keys that they block."""
    sides = load_sides(side)
    with administration(
        database_url(database),
        application_name="pillarbox blocked",
        rights="GRANT pillarbox_monitor TO its role; for one side, with --side, "
        "pillarbox_relay or pillarbox_consumer is enough",
    ) as connection:
        found = {s.schema: s.read_blocked(connection, limit) for s in sides}
        counts = [s.read_blocked_count(connection) for s in sides]
    counted = BlockedCount(
        keys=sum(it.keys for it in counts),
        without_key=sum(it.without_key for it in counts),
    )
    messages = sorted(
        ((it, schema) for schema, each in found.items() for it in each),
        key=lambda message: message[0].created_at,
    )
    if json:
        write_json(
            {
                **asdict(counted),
                "messages": [{"side": s, **asdict(it)} for it, s in messages],
            }
        )
        return
    write_line(_summary(counted))
    if messages:
        _write_table(messages)


def _summary(counted: BlockedCount) -> str:
    if not counted.keys and not counted.without_key:
        return "no key is blocked, and no refused message waits"
    return (
        f"{count(counted.keys, 'blocked key')}, "
        f"{count(counted.without_key, 'refused message')} without a key"
    )


def _write_table(messages: Sequence[tuple[Blocked, str]]) -> None:
    now = datetime.now(UTC)
    write_table(
        _COLUMNS,
        [
            (
                _NO_KEY if it.key is None else it.key,
                write_duration(now - it.created_at),
                side,
                write_duration(it.available_at - now),
                it.attempts,
                it.topic,
                it.consumer,
                it.id,
                (it.last_error or "")[:_MAX_REASON],
            )
            for it, side in messages
        ],
    )
