"""A payload that contradicts its content type is dead-lettered unchanged."""

from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from inbox.events import HandlerFailed, MessageDeadLettered, MessageHandled
from inbox.jobs.job import AsyncJob
from inbox.sources.memory import MemorySource
from pillarbox import Message
from tests.fixtures.consumers import NEVER, consuming
from tests.fixtures.jobs import LEASE
from tests.fixtures.sessions import execute
from tests.fixtures.variants import in_turn

NO_JSON = b'\xff\x00{"order": '
LETTERS = """
    SELECT message_id, payload, content_type, attempts, status, error_reason
      FROM inbox.dead_letter
"""


class Handled(list[object]):
    """Handlers of each kind, which record the messages they receive."""

    async def one(self, _: AsyncSession, message: Message) -> None:
        self.append(message.json())

    async def many(self, _: AsyncSession, messages: Sequence[Message]) -> None:
        self.extend(message.json() for message in messages)

    async def long(self, _: AsyncJob, message: Message) -> None:
        self.append(message.json())


KINDS: Any = [
    pytest.param("one", {}, id="one"),
    pytest.param("many", {"batch": 8}, id="many"),
    pytest.param("long", {"lease": LEASE}, id="long"),
]
TYPES: Any = [
    pytest.param("application/json", "isn't JSON", id="json"),
    pytest.param("application/order+json", "isn't JSON", id="+json"),
    pytest.param("text/plain; charset=utf-8", "can't decode byte 0xff", id="text"),
]


@pytest.mark.parametrize(
    ("kind", "terms", "content_type", "says"), in_turn(KINDS, TYPES)
)
async def test_a_mismatched_payload_is_dead_lettered_unchanged_and_the_next_is_handled(
    database_url: str, kind: str, terms: dict[str, Any], content_type: str, says: str
) -> None:
    wrong = Message("orders", NO_JSON, key="k", content_type=content_type)
    sound = Message("orders", {"order": 1}, key="k")
    source, handled = MemorySource(wrong, sound), Handled()
    handler = getattr(handled, kind)
    async with consuming(database_url, source, handler, terms, retry=NEVER) as events:
        await events.wait_for(MessageHandled)

    assert handled == [{"order": 1}]
    assert source.acked == [wrong, sound]
    assert events.of(HandlerFailed) == []
    (given_up,) = events.of(MessageDeadLettered)
    assert given_up.id == wrong.id
    ((*letter, reason),) = execute(database_url, LETTERS)
    assert letter == [str(wrong.id), NO_JSON, content_type, 1, "PENDING"]
    assert "doesn't match its content type" in reason
    assert says in reason
