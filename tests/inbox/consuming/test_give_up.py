"""One dead letter per message, despite crashes and concurrent writers."""

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import sessionmaker

from pillarbox import DeadLetter, Message
from pillarbox.inbox.dead_letters.write import DeadLetterWriter
from pillarbox.inbox.events import (
    DeadLetterRepeated,
    HandlerFailed,
    MessageDeadLettered,
)
from pillarbox.inbox.handlers.sessions import make_executor
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.gather import gather
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from tests.fixtures.consumers import (
    QUICK,
    consuming,
    numbered,
    sessions_of,
)
from tests.fixtures.sessions import execute

pytestmark = pytest.mark.timeout(180)


def count(url: str) -> int:
    ((rows,),) = execute(url, "SELECT count(*) FROM inbox.dead_letter")
    return int(rows)


async def test_a_redelivered_message_is_not_dead_lettered_again(
    database_url: str,
) -> None:
    message, another = Message("orders", b""), Message("orders", b"another")
    source = MemorySource(message)

    async def handle(session: AsyncSession, message: Message) -> None:
        raise DeadLetter("no such customer")

    async with consuming(database_url, source, handle) as events:
        await events.wait_for(MessageDeadLettered)
        # As if the consumer had crashed between the dead letter and the ack.
        source.add(message, another)
        await events.wait_for(MessageDeadLettered, 2)
    assert len(source.acked) == 3
    assert len(events.of(MessageDeadLettered)) == 2
    assert len(events.of(DeadLetterRepeated)) == 1
    assert count(database_url) == 2


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
async def test_concurrent_consumers_write_one_dead_letter(
    database_url: str, level: str
) -> None:
    engine = create_engine(
        sqlalchemy_url(database_url), isolation_level=level, pool_size=8
    )
    writer = DeadLetterWriter(
        "billing", make_executor(sessionmaker(engine), "billing", 8)
    )
    message = Message("orders", b"")

    async def write(_: int) -> bool:
        written = await writer.write(message, attempts=1, failure="no")
        return written.is_new

    new = await gather(write(n) for n in range(24))
    engine.dispose()
    assert sum(new) == 1
    assert count(database_url) == 1


async def test_a_message_can_be_dead_lettered_again_once_its_dead_letter_is_settled(
    database_url: str,
) -> None:
    message = Message("orders", b"")
    with sessions_of(database_url) as sessions:

        async def is_new(consumer: str = "billing") -> bool:
            executor = make_executor(sessions, consumer, 1)
            writer = DeadLetterWriter(consumer, executor)
            return (await writer.write(message, attempts=1, failure="no")).is_new

        assert await is_new()
        assert not await is_new()
        execute(database_url, "UPDATE inbox.dead_letter SET status = 'SUCCEEDED'")
        assert await is_new()
        assert await is_new("shipping")
    assert count(database_url) == 3


async def test_an_unreadable_message_is_identified_by_all_its_content(
    database_url: str,
) -> None:
    with sessions_of(database_url) as sessions:
        writer = DeadLetterWriter("billing", make_executor(sessions, "billing", 1))

        async def is_new(message: Message) -> bool:
            # Each time with another id, because the source has to invent one.
            written = await writer.write(
                message, attempts=1, failure="no id", readable=False
            )
            return written.is_new

        assert await is_new(Message("orders", b"garbage"))
        assert not await is_new(Message("orders", b"garbage"))
        assert await is_new(Message("orders", b"other garbage"))
        assert await is_new(Message("orders", b"garbage", headers={"n": "1"}))
    rows = execute(database_url, "SELECT message_id FROM inbox.dead_letter")
    assert all(id.startswith("sha256:") for (id,) in rows)


@pytest.mark.parametrize(
    ("error", "said"),
    [(KeyError("hunter2"), "KeyError"), (SystemExit("hunter2"), "SpecialError")],
)
async def test_a_redaction_that_fails_hides_the_whole_error_and_ends_no_process(
    error: BaseException, said: str, database_url: str
) -> None:
    async def handle(session: AsyncSession, message: Message) -> None:
        raise ValueError("hunter2")

    def redact(said: str) -> str:
        raise error

    source = MemorySource(*numbered(1))
    async with consuming(
        database_url, source, handle, retry=QUICK, redact=redact
    ) as events:
        (given_up,) = await events.wait_for(MessageDeadLettered)
    left_out = f"omitted: redact raised {said}"
    assert given_up.reason == left_out
    assert {event.reason for event in events.of(HandlerFailed)} == {left_out}
    query = "SELECT error_reason, error_stacktrace FROM inbox.dead_letter"
    assert execute(database_url, query) == [(left_out, left_out)]
