"""`pillarbox subscribe` and `unsubscribe`, for the postgres broker."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, TypeAlias

import typer

from inbox.handlers.routes import check_topic
from inbox.receipt import check_text
from inbox.subscriptions import subscribe, unsubscribe
from outbox.administration.connection import errors_explained
from outbox.cli.command import Database, command, database_url, new_app
from outbox.cli.output import write_line
from outbox.cli.supervisor import run_coroutine
from outbox.postgres.connection import Connection, connect

ConsumerName: TypeAlias = Annotated[
    str, typer.Argument(metavar="CONSUMER", help="Name of the consumer.")
]
Topics: TypeAlias = Annotated[
    list[str],
    typer.Argument(
        metavar="TOPIC...", help="Topics, or prefixes followed by a star: 'orders.*'."
    ),
]

subscribe_app = new_app()
unsubscribe_app = new_app()


@command(subscribe_app, "subscribe")
def _subscribe(
    consumer: ConsumerName, topics: Topics, *, database: Database = None
) -> None:
    """Subscribe a consumer of the postgres broker to topics."""

    async def change(connection: Connection) -> str:
        await subscribe(connection, consumer, topics)
        return f"{consumer} is subscribed to {', '.join(topics)}"

    _change(consumer, topics, database, change)


@command(unsubscribe_app, "unsubscribe")
def _unsubscribe(
    consumer: ConsumerName, topics: Topics, *, database: Database = None
) -> None:
    """Unsubscribe a consumer of the postgres broker from topics."""

    async def change(connection: Connection) -> str:
        ended = await unsubscribe(connection, consumer, topics)
        if not ended:
            return f"{consumer} was subscribed to none of {', '.join(topics)}"
        return (
            f"{consumer} is no longer subscribed to {', '.join(ended)}; "
            "it gets no more of them, and none holds its day"
        )

    _change(consumer, topics, database, change)


def _change(
    consumer: str,
    topics: Sequence[str],
    database: str | None,
    change: Callable[[Connection], Awaitable[str]],
) -> None:
    check_text("consumer", consumer)
    for topic in topics:
        check_topic(topic)
    url = database_url(database)

    async def run() -> str:
        with errors_explained(url, "grant the role pillarbox_consumer to its user"):
            async with await connect(
                url, application_name="pillarbox subscribe", shared=True
            ) as connection:
                return await change(connection)

    write_line(run_coroutine(run()))
