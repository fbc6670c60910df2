"""A consumer with several queues: each is a consumer group of its own."""

import psycopg
from sqlalchemy.orm import Session

from pillarbox import Consumer, Message, add
from pillarbox.inbox.events import MessageHandled
from pillarbox.outbox.observability.measures.reading import Scope
from pillarbox.outbox.observability.message_life import read_trace
from pillarbox.outbox.observability.overview import read_overview
from tests.fixtures.consumers import running, sessions_of
from tests.fixtures.waiting import wait_for


async def test_the_queue_of_a_running_consumer_runs_and_has_acked(
    database_url: str,
) -> None:
    message = Message("reports.wanted", b"")
    with (
        sessions_of(database_url) as sessions,
        psycopg.connect(database_url, autocommit=True) as connection,
    ):
        consumer = Consumer(database_url, sessions, name="desk")

        @consumer.handles("orders.placed")
        def bill(session: Session, message: Message) -> None: ...

        @consumer.handles("reports.*", queue="reports")
        def report(session: Session, message: Message) -> None: ...

        def replicas() -> dict[str, int | None]:
            overview = read_overview(connection, Scope(parts=["consumers"]))
            return {it.name: it.replicas for it in overview.consumers}

        async with running(consumer) as events:
            with sessions.begin() as session:
                add(session, message)
            await events.wait_for(MessageHandled)
            assert replicas() == {"desk": 1, "desk--reports": 1}
        assert replicas() == {"desk": 0, "desk--reports": 0}

        def steps() -> dict[str | None, str]:
            life = read_trace({"here": connection}, message.id).life
            return {it.consumer: it.what for it in life.handlings}

        wait_for(
            "its ack", lambda: steps() == {"desk": "handled", "desk--reports": "acked"}
        )
