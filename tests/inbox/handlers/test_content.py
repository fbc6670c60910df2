"""A payload that contradicts its content type is dead-lettered unchanged."""

from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from pillarbox import Message
from pillarbox.inbox.errors import DeadLetter
from pillarbox.inbox.events import HandlerFailed, MessageDeadLettered, MessageHandled
from pillarbox.inbox.handlers.upcasting import check_content
from pillarbox.inbox.jobs.job import AsyncJob
from pillarbox.inbox.sources.memory import MemorySource
from tests.fixtures.consumers import NEVER, consuming
from tests.fixtures.jobs import LEASE
from tests.fixtures.sessions import execute
from tests.fixtures.variants import in_turn

GZIPPED = b"\x1f\x8b\x08\x00"


@pytest.mark.parametrize(
    ("content_type", "payload"),
    [
        ("application/json", b"{"),
        ("application/json", b""),
        ("application/json", b"\xff{}"),
        ("application/json; charset=utf-8", b"not this"),
        ("application/JSON", b"not this"),
        ("application/cloudevents+json", b"not this"),
        ("application/json", b"[" * 100_000),
        ("text/plain; charset=utf-8", b"\xff"),
        ('text/csv; header=present; charset="US-ASCII"', "ä".encode()),
        ("Text/HTML;charset=utf-16", b"odd"),
    ],
)
def test_a_payload_that_contradicts_its_content_type_is_refused(
    content_type: str, payload: bytes
) -> None:
    message = Message("orders", payload, content_type=content_type)
    with pytest.raises(DeadLetter, match="doesn't match its content type '") as refused:
        check_content(message)
    assert content_type in str(refused.value)


@pytest.mark.parametrize(
    ("content_type", "payload"),
    [
        ("application/json", b'{"a": 1}'),
        ("application/json", b"null"),
        ("application/json", '"ä"'.encode("utf-16")),
        ("application/jsonish", b"{"),
        ("text/plain; is=application/json", b"{"),
        ("application/octet-stream", b"\xff"),
        ("text/plain; charset=utf-8", "ä".encode()),
        ("text/plain; charset=latin-1", b"\xff"),
        ("text/plain; charset=klingon", b"\xff"),
        ("text/plain; charset=base64", b"\xff"),
        ("text/plain", b"\xff"),
        ("image/png", b"\xff"),
        ("", b"\xff"),
    ],
)
def test_a_payload_that_could_match_its_content_type_is_accepted(
    content_type: str, payload: bytes
) -> None:
    check_content(Message("orders", payload, content_type=content_type))


@pytest.mark.parametrize("content_type", ["application/json", "text/a; charset=utf-8"])
def test_a_payload_with_a_content_encoding_is_not_checked(content_type: str) -> None:
    headers = {"Content-Encoding": "gzip"}
    check_content(
        Message("orders", GZIPPED, content_type=content_type, headers=headers)
    )


def test_the_identity_encoding_does_not_excuse_invalid_json() -> None:
    headers = {"content-encoding": "identity"}
    with pytest.raises(DeadLetter):
        check_content(
            Message("orders", GZIPPED, content_type="application/json", headers=headers)
        )


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
