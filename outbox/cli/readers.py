"""`pillarbox readers`: who reads the outbox, and publishes it where."""

from typing import Annotated, TypeAlias

import typer

from pillarbox.outbox.administration.readers import (
    add_reader,
    count_of,
    drop_reader,
    held_by,
    list_readers,
)
from pillarbox.outbox.cli.command import (
    Database,
    Json,
    broker_url_if_given,
    command,
    new_app,
    opened,
)
from pillarbox.outbox.cli.output import write_json, write_line, write_table
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.logs.printable import for_shell

_RIGHTS = "connect as a member of pillarbox_relay, or of pillarbox_monitor to list them"
_TO_DROP = "connect as a member of pillarbox_operator"

app = new_app(help="List, add and drop the readers of the outbox.")

Name: TypeAlias = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the reader.")
]


@command(app, "list")
def _list(*, database: Database = None, json: Json = False) -> None:
    """List the readers, with the backlog of each and the days that it holds."""
    with opened(database, "readers", rights=_RIGHTS) as connection:
        readers = list_readers(connection)
    if json:
        write_json(readers)
        return
    write_table(
        (
            "reader",
            "state",
            "waiting",
            "oldest",
            "holds",
            "topics",
            "broker",
            "role",
        ),
        [
            (
                it.reader,
                "dropped"
                if it.dropped_at is not None
                else "discards"
                if it.discards
                else "reads",
                count_of(it).removesuffix(" messages").removesuffix(" message"),
                it.oldest,
                held_by(it) if it.days else None,
                ", ".join(it.topics),
                it.broker,
                it.role,
            )
            for it in readers
        ],
    )


@command(app, "add")
def _add(
    name: Name,
    *,
    broker: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where its relays publish, such as https://example.com/hooks.",
        ),
    ] = None,
    consumer: Annotated[
        bool,
        typer.Option(
            "--consumer",
            help="The consumer of this name handles its messages; it has no relays.",
        ),
    ] = False,
    topics: Annotated[
        list[str] | None,
        typer.Option(
            "--topic",
            metavar="TOPIC",
            help="Topic, or prefix followed by a star; repeat it for several. A new "
            "reader gets all topics by default.",
        ),
    ] = None,
    role: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE",
            help="Role that may run it without being a member of pillarbox_relay.",
        ),
    ] = None,
    from_oldest: Annotated[
        bool,
        typer.Option(
            "--from-oldest",
            help="Start at the oldest message; by default, at the next one added.",
        ),
    ] = False,
    discard: Annotated[
        bool,
        typer.Option(
            "--discard", help="Discard these messages instead of publishing them."
        ),
    ] = False,
    database: Database = None,
) -> None:
    """Add a reader, for relays with --reader NAME or a consumer, or topics to it."""
    if consumer and broker is not None:
        raise ConfigError("--consumer: a consumer has no broker; omit --broker")
    url = None if discard or consumer else broker_url_if_given(broker)
    with opened(database, "readers", rights=_RIGHTS) as connection:
        add_reader(
            connection,
            name,
            topics,
            broker=url,
            for_consumer=consumer,
            discard=discard,
            role=role,
            from_oldest=from_oldest,
        )
    gets = f"{name} {'discards' if discard else 'gets'} {', '.join(topics or ['*'])}"
    if url is not None:
        gets += f"; start its relays with pillarbox relay --reader {for_shell(name)}"
    write_line(gets)


@command(app, "drop")
def _drop(
    name: Name,
    *,
    discard: Annotated[
        bool, typer.Option("--discard", help="Drop it even if it has a backlog.")
    ] = False,
    database: Database = None,
) -> None:
    """Drop a reader; its messages no longer hold their days."""
    with opened(database, "readers", rights=_TO_DROP) as connection:
        dropped = drop_reader(connection, name, discard=discard)
    left = f" with a backlog of {count_of(dropped)}" if dropped.messages else ""
    write_line(f"{name} was dropped{left}")
