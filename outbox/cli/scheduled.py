"""`pillarbox scheduled`: messages that aren't due; cancel them, or move them."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final, TypeAlias

import typer

from pillarbox.outbox.administration.scheduled import (
    Change,
    cancel_message,
    list_scheduled,
    move_message,
)
from pillarbox.outbox.cli.command import (
    Database,
    Json,
    Key,
    Limit,
    Reason,
    Tenant,
    Topic,
    command,
    duration_option,
    new_app,
    opened,
)
from pillarbox.outbox.cli.output import write_json, write_line, write_table
from pillarbox.outbox.duration import read_moment
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.logs.printable import for_shell
from pillarbox.outbox.observability.message_life import read_id

_COLUMNS: Final = ("id", "due in", "topic", "key", "tenant", "priority", "readers")
_TO_READ: Final = "GRANT pillarbox_monitor TO its role"
_TO_CHANGE: Final = "connect as a member of pillarbox_operator"
_MOST: Final = 50
_EPILOG: Final = (
    "Exit status 1: a message is already due or unknown, or one to move was already"
    " cancelled."
)

app = new_app(help="List, cancel and move scheduled messages, until they are due.")

Ids: TypeAlias = Annotated[
    list[str], typer.Argument(metavar="ID...", help="Ids of the messages.")
]


@command(app, "list")
def _list(
    *,
    topic: Topic = None,
    key: Key = None,
    tenant: Tenant = None,
    limit: Limit = _MOST,
    database: Database = None,
    json: Json = False,
) -> None:
    """List the messages that are not due, the next ones first."""
    with opened(database, "scheduled", rights=_TO_READ) as connection:
        found = list_scheduled(
            connection, topic=topic, key=key, tenant=tenant, limit=limit or _MOST
        )
    if json:
        write_json(found)
        return
    now = datetime.now(UTC)
    rows = [
        (
            it.id,
            it.due_at - now,
            it.topic,
            it.key,
            it.tenant,
            it.priority,
            ", ".join(it.readers) or None,
        )
        for it in found
    ]
    write_table(_COLUMNS, rows)


@command(app, "cancel", epilog=_EPILOG)
def _cancel(
    ids: Ids, *, reason: Reason = "", database: Database = None, json: Json = False
) -> int:
    """Cancel scheduled messages: no reader publishes or handles them."""
    chosen = [read_id(id) for id in ids]
    with opened(database, "scheduled", rights=_TO_CHANGE) as connection:
        changes = [cancel_message(connection, id, reason or None) for id in chosen]
    _show(changes, as_json=json)
    return 0 if all(it.is_cancelled for it in changes) else 1


@command(app, "move", epilog=_EPILOG)
def _move(
    ids: Ids,
    *,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="MOMENT",
            help="When it is due: a moment with its time zone, such as "
            "2026-01-31T14:00Z.",
        ),
    ] = None,
    within: Annotated[
        timedelta | None,
        duration_option("--in", help="Time until it is due; 0s publishes it now."),
    ] = None,
    reason: Reason = "",
    database: Database = None,
    json: Json = False,
) -> int:
    """Move scheduled messages: cancel each, and add its content with a new id.

    All of it happens in one transaction.
    """
    if (to is None) == (within is None):
        raise ConfigError("pass either --to MOMENT or --in DURATION")
    now = datetime.now(UTC)
    due_at = (
        read_moment("--to", to) if to is not None else now + (within or timedelta())
    )
    if to is not None and due_at < now:
        raise ConfigError(f"--to {for_shell(to)}: is past; --in 0s publishes it now")
    chosen = [read_id(id) for id in ids]
    with (
        opened(database, "scheduled", rights=_TO_CHANGE) as connection,
        connection.transaction(),  # after an error, nothing was changed
    ):
        changes = [
            move_message(connection, id, due_at, reason or None) for id in chosen
        ]
    _show(changes, as_json=json)
    return 0 if all(it.new_id is not None for it in changes) else 1


def _show(changes: Sequence[Change], *, as_json: bool) -> None:
    if as_json:
        write_json(changes)
    else:
        write_line(*(it.text for it in changes))
