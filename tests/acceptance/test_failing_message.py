"""A poison message among thousands delays only its own key."""

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from pillarbox import Message
from pillarbox.inbox.events import HandlerFailed, MessageHandled
from pillarbox.inbox.sources.postgres import PostgresSource
from tests.fixtures.consumers import NEVER, consuming
from tests.fixtures.effects import EFFECTS, effects, note
from tests.fixtures.readers import add_consumer
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute

KEYS = 20
POISON = b"poison"


@pytest.mark.fault
@pytest.mark.timeout(300)
async def test_a_poison_message_holds_back_its_key_and_no_other(
    database_url: str, full: bool
) -> None:
    count = 3_000 if full else 100
    execute(database_url, EFFECTS)
    add_consumer(database_url, "billing", "orders")
    insert(
        database_url,
        *(
            Message("orders", POISON if n == KEYS else b"%d" % n, key=str(n % KEYS))
            for n in range(count)
        ),
    )

    async def handle(session: AsyncSession, message: Message) -> None:
        if message.payload == POISON:
            raise ValueError("poison")
        await note(session, message)

    source = PostgresSource(database_url, consumer="billing", topics=["orders"])
    async with consuming(database_url, source, handle, retry=NEVER) as events:
        # All others are handled while the poison message waits for its retry.
        others = count - count // KEYS + 1
        await events.wait_for(MessageHandled, others, timeout=240)
        await events.wait_for(HandlerFailed, timeout=60)
    assert len(events.of(MessageHandled)) == others
    assert len(events.of(HandlerFailed)) == 1
    done = {int(what) for what in effects(database_url)}
    assert done == {n for n in range(count) if n % KEYS or n < KEYS}
