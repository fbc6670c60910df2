"""`pillarbox blocked`: refused messages that wait, and the keys that they block."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Final

from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.administration.readers import consumer_of, list_consumers
from pillarbox.outbox.cli.command import (
    Databases,
    Json,
    Limit,
    SideOption,
    command,
    new_app,
    opened_all,
)
from pillarbox.outbox.cli.output import write_json, write_line, write_table
from pillarbox.outbox.dead_letters.statement import Schema
from pillarbox.outbox.observability.measures.failures import Blocked, read_blocked
from pillarbox.outbox.observability.measures.processes import Process, list_processes

_RIGHTS: Final = (
    "GRANT pillarbox_monitor TO its role; for one side, with --side, pillarbox_relay "
    "or pillarbox_consumer is enough"
)
_MAX_REASON: Final = 80
_MOST: Final = 50
_COLUMNS: Final = (
    "key",
    "age",
    "due in",
    "attempts",
    "topic",
    "reader",
    "message",
    "reason",
)
_PROCESSES: Final = ("process", "broker", "blocked keys", "failing for", "reason")
_NO_KEY: Final = "(none)"

app = new_app()


@command(
    app,
    epilog="Over brokers, blocked keys are held in the consumer, which reports their "
    "number and the oldest failure. A consumer is shown in the database of its "
    "handlers.",
)
def blocked(
    *,
    side: SideOption = None,
    limit: Limit = _MOST,
    database: Databases = None,
    json: Json = False,
) -> None:
    """List refused messages that wait for a retry, and the keys that they block."""
    now = datetime.now(UTC)
    sides: tuple[Schema, ...] = ("outbox", "inbox") if side is None else (side,)
    with opened_all(database, "blocked", rights=_RIGHTS) as databases:
        read = {
            name: _read(connection, sides, limit or _MOST, now)
            for name, connection in databases.items()
        }
    if json:
        write_json([_as_json(name, *found) for name, found in read.items()])
        return
    for name, found in read.items():
        _write(name, *found, now)


def _read(
    connection: AdministrationConnection,
    sides: Sequence[Schema],
    limit: int,
    now: datetime,
) -> tuple[Blocked, Sequence[Process]]:
    found = Blocked()
    listed: list[str] = []
    if "outbox" in sides:
        found = read_blocked(connection, limit)
        listed = [consumer_of(it) for it in list_consumers(connection)]
    running = [
        it
        for schema in sides
        for it in list_processes(connection, schema)
        if it.blocked_keys or it.failing_since is not None or it.is_overdue(now)
    ]
    others = (it for it in running if it.kind != "relay" and it.name not in listed)
    keys = found.keys + sum(it.blocked_keys for it in others)
    return replace(found, keys=keys), running


def _as_json(
    name: str, found: Blocked, running: Sequence[Process]
) -> dict[str, object]:
    counted = asdict(found)
    messages = counted.pop("oldest")
    return {"database": name, "messages": messages, **counted, "processes": running}


def _write(
    name: str, found: Blocked, running: Sequence[Process], now: datetime
) -> None:
    if found.keys or found.without_key or running:
        write_line(f"{name}: {found.summary}")
    else:
        write_line(f"{name}: no blocked keys and no refused messages")
    if found.oldest:
        write_table(
            _COLUMNS,
            [
                (
                    _NO_KEY if it.key is None else it.key,
                    now - it.created_at,
                    it.available_at - now,
                    it.attempts,
                    it.topic,
                    it.reader,
                    it.id,
                    (it.last_error or "")[:_MAX_REASON],
                )
                for it in found.oldest
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
