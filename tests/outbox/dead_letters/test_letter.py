"""A dead letter restores its message, and shows a JSON payload as JSON."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from pillarbox import Message
from pillarbox.outbox.dead_letters.criteria import Criteria
from pillarbox.outbox.dead_letters.letter import Letter, Status
from pillarbox.outbox.dead_letters.schedule import RetrySchedule
from pillarbox.outbox.errors import InvalidMessageError
from pillarbox.outbox.lane import Priority


def letter(message: Message, **changes: Any) -> Letter:
    now = datetime.now(UTC)
    values: dict[str, Any] = {
        "id": uuid4(),
        "created_at": now,
        "updated_at": now,
        "status": Status.PENDING,
        "retry_count": 0,
        "retry_after": None,
        "origin": "relay:main",
        "message_id": str(message.id),
        "topic": message.topic,
        "key": message.key,
        "tenant": message.tenant,
        "attempts": 3,
        "error_reason": "no",
        "discard_reason": None,
        "discarded_by": None,
        "schema_version": message.schema_version,
        "priority": message.priority.value,
        "content_type": message.content_type,
        "headers": dict(message.headers),
        "payload": message.payload,
        "error_stacktrace": None,
    }
    return Letter(**{**values, **changes})


def test_the_message_is_restored_unchanged() -> None:
    message = Message("t", {"a": 1}, key="k", headers={"h": "v"}, schema_version=2)
    message = message.replace(priority=Priority.REALTIME)
    assert letter(message).message() == message


def test_the_dead_letter_of_a_foreign_message_is_refused() -> None:
    foreign: list[dict[str, Any]] = [
        {"message_id": "sha256:12"},
        {"message_id": "191a7297-3bf7-4e3d-aa5b-bc02c28bb4b5"},
        {"headers": ["no", "object"]},
        {"headers": {"n": 1}},
        {"topic": ""},
        {"topic": "t" * 200 + "…"},
        {"content_type": ""},
    ]
    for changes in foreign:
        with pytest.raises(InvalidMessageError, match="discard this one"):
            letter(Message("t", b""), **changes).message()


def test_a_json_payload_is_shown_as_json() -> None:
    suffix = "Application/Cloudevents+JSON; charset=utf-8"
    for content_type, payload, shown in (
        ("application/json", b'{"a": 1}', {"payload_json": {"a": 1}}),
        (suffix, b"null", {"payload_json": None}),
        ("application/json", b"{", {"payload_base64": "ew=="}),
        ("text/plain", b"1", {"payload_base64": "MQ=="}),
    ):
        values = letter(Message("t", payload, content_type=content_type)).as_json()
        found = {name: v for name, v in values.items() if name.startswith("payload")}
        assert (content_type, found) == (content_type, shown)


def test_a_topic_with_a_star_matches_the_prefix() -> None:
    exact = Criteria(topic="orders.placed").parameters()
    many = Criteria(topic="orders.*").parameters()
    assert (exact["topic"], exact["topic_prefix"]) == ("orders.placed", None)
    assert (many["topic"], many["topic_prefix"]) == (None, "orders.")


def test_a_failed_retry_is_delayed_less_than_the_interval_except_the_last() -> None:
    schedule = RetrySchedule()
    for count in (1, 2, 100, 239):
        delay = schedule.delay(count)
        assert delay is not None
        assert timedelta(minutes=10) <= delay < schedule.interval
    assert schedule.delay(240) is None
