"""`pillarbox blocked`: refused messages that wait, and the keys that they block."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Final

from outbox.administration.sides import BlockedCount, load_sides
from outbox.cli.command import (
    Database,
    Json,
    Limit,
    SideOption,
    command,
    new_app,
    opened,
)
from outbox.cli.output import write_json, write_line, write_table
from outbox.logs.printable import count
from outbox.observability.measures.processes import list_processes

_RIGHTS: Final = (
    "GRANT pillarbox_monitor TO its role; for one side, with --side, pillarbox_relay "
    "or pillarbox_consumer is enough"
)
_MAX_REASON: Final = 80
_MOST: Final = 50
_COLUMNS: Final = (
    "key",
    "age",
    "side",
    "due in",
    "attempts",
    "topic",
    "reader or consumer",
    "message",
    "reason",
)
_PROCESSES: Final = ("process", "broker", "blocked keys", "failing for", "reason")
_NO_KEY: Final = "(none)"

app = new_app()


@command(
    app,
    epilog="Messages of other brokers than postgres wait in the consumer, which "
    "records how many keys they block, and the one that has failed for longest. A "
    "consumer is shown in the database of its handlers.",
)
def blocked(
    *,
    side: SideOption = None,
    limit: Limit = _MOST,
    database: Database = None,
    json: Json = False,
) -> None:
    """List refused messages that wait for a retry, and the keys that they block."""
    sides, now = load_sides(side), datetime.now(UTC)
    with opened(database, "blocked", rights=_RIGHTS) as connection:
        found = {s.schema: s.read_blocked(connection, limit or _MOST) for s in sides}
        counts = [s.read_blocked_count(connection) for s in sides]
        running = [
            it
            for s in sides
            for it in list_processes(connection, s.schema)
            if it.blocked_keys or it.failing_since is not None or it.is_overdue(now)
        ]
    counts += [BlockedCount(it.blocked_keys, 0) for it in running if not it.is_listed]
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
                "processes": running,
            }
        )
        return
    write_line(_summary(counted, is_failing=bool(running)))
    if messages:
        write_table(
            _COLUMNS,
            [
                (
                    _NO_KEY if it.key is None else it.key,
                    now - it.created_at,
                    schema,
                    it.available_at - now,
                    it.attempts,
                    it.topic,
                    it.consumer or it.reader,
                    it.id,
                    (it.last_error or "")[:_MAX_REASON],
                )
                for it, schema in messages
            ],
        )
    if running:
        write_table(
            _PROCESSES,
            [
                (
                    f"{it.kind} {it.name} on {it.host}",
                    it.broker,
                    it.blocked_keys,
                    it.failing_since and now - it.failing_since,
                    (it.reason or "")[:_MAX_REASON] or it.running(now),
                )
                for it in running
            ],
        )


def _summary(counted: BlockedCount, *, is_failing: bool) -> str:
    if not (counted.keys or counted.without_key or is_failing):
        return "no key is blocked, and no refused message waits"
    return (
        f"{count(counted.keys, 'blocked key')}, "
        f"{count(counted.without_key, 'refused message')} without a key"
    )
