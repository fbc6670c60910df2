"""`pillarbox subscribe` and `unsubscribe`, for the postgres broker."""

from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar

import typer

from inbox.handlers.routes import check_topic
from inbox.receipt import check_text
from inbox.subscriptions import subscribe, unsubscribe
from outbox.administration.connection import errors_explained
from outbox.cli.command import Database, command, database_url, new_app
from outbox.cli.output import write_line
from outbox.cli.supervisor import run_coroutine
from outbox.postgres.connection import Connection, connect
from outbox.postgres.superuser import refuse_superuser

T = TypeVar("T")
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
    _change(subscribe, consumer, topics, database)
    write_line(f"{consumer} is subscribed to {', '.join(topics)}")


@command(unsubscribe_app, "unsubscribe")
def _unsubscribe(
    consumer: ConsumerName, topics: Topics, *, database: Database = None
) -> None:
    """Unsubscribe a consumer of the postgres broker from topics."""
    ended = _change(unsubscribe, consumer, topics, database)
    if ended:
        write_line(
            f"{consumer} is no longer subscribed to {', '.join(ended)}; "
            "it gets no more of them, and none holds its day"
        )
    else:
        write_line(f"{consumer} was subscribed to none of {', '.join(topics)}")


def _change(
    change: Callable[[Connection, str, Sequence[str]], Coroutine[Any, Any, T]],
    consumer: str,
    topics: Sequence[str],
    database: str | None,
) -> T:
    check_text("consumer", consumer)
    for topic in topics:
        check_topic(topic)
    url = database_url(database)

    async def run() -> T:
        with errors_explained(url, "grant the role pillarbox_consumer to its user"):
            async with await connect(
                url, application_name="pillarbox subscribe", shared=True
            ) as connection:
                await refuse_superuser(connection)
                return await change(connection, consumer, topics)

    return run_coroutine(run())
