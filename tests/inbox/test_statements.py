"""The statements that guard and consumer add to a handler's transaction."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import StaticPool

from inbox.events import MessageHandled
from inbox.sources.memory import MemorySource
from outbox.postgres.connection import sqlalchemy_url
from pillarbox import Consumer, Message, guard, idempotent
from tests.fixtures.consumers import numbered, running, sessions_of
from tests.fixtures.effects import EFFECT

RECEIPT = ["INSERT INTO inbox.receipt"]
OWN = ["INSERT INTO effect", "COMMIT"]


@contextmanager
def recorded_statements(engine: Engine) -> Iterator[list[str]]:
    """Record the first words of each statement of this engine, and its commits."""
    seen: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        seen.append(" ".join(statement.split()[:3]))

    def note_commit(_connection: Any) -> None:
        seen.append("COMMIT")

    event.listen(engine, "before_cursor_execute", note)
    event.listen(engine, "commit", note_commit)
    try:
        yield seen
    finally:
        event.remove(engine, "before_cursor_execute", note)
        event.remove(engine, "commit", note_commit)


def handle(session: Session, message: Message) -> None:
    session.execute(EFFECT, {"what": message.payload.decode()})


def handle_in_guard(session: Session, message: Message) -> None:
    with guard(session, message.id, consumer="billing") as is_new:
        assert is_new
        handle(session, message)


@pytest.mark.parametrize(
    "guarded",
    [idempotent(consumer="billing")(handle), handle_in_guard],
    ids=["decorator", "context manager"],
)
def test_the_guard_adds_one_statement(
    guarded: Callable[[Session, Message], None], url: str
) -> None:
    with sessions_of(url) as sessions, recorded_statements(sessions.kw["bind"]) as seen:
        for message in numbered(2):
            with sessions.begin() as session:
                guarded(session, message)

    assert seen == [*RECEIPT, *OWN] * 2


async def test_the_consumer_adds_the_receipt_and_nothing_else(url: str) -> None:
    # With one connection, which handlers need, a consumer doesn't record that it runs.
    engine = create_engine(sqlalchemy_url(url), poolclass=StaticPool)
    source, sessions = MemorySource(*numbered(3)), sessionmaker(engine)
    consumer = Consumer(source, sessions, name="billing", max_in_flight=1)
    consumer.handles("*")(handle)
    with recorded_statements(engine) as seen:
        async with running(consumer) as events:
            await events.wait_for(MessageHandled, 3)
    engine.dispose()

    # At the start: does the inbox exist, may it be written? Then missing partitions are
    # created.
    start = ["SELECT 1 FROM", "-- Does: Look", "-- Does: Create"]
    start = [said for one in start for said in (one, "COMMIT")]
    assert seen == start + [*RECEIPT, *OWN] * 3
