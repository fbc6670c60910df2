"""The limits of a message: each error names the field, the value and the remedy."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from pillarbox import ConfigError, InvalidMessageError, Message, uuid7
from pillarbox.outbox.errors import shorten
from pillarbox.outbox.lane import Priority
from pillarbox.outbox.limits import Limits

NOW = datetime.now(UTC)


def message(**fields: Any) -> Message:
    return Message(**{"topic": "orders.placed", "payload": b"{}", **fields})


def id_of(moment: datetime) -> UUID:
    milliseconds = int(moment.timestamp() * 1000)
    return UUID(int=milliseconds << 80 | uuid7().int & (1 << 80) - 1)


NAIVE = datetime(2030, 1, 1)  # noqa: DTZ001 - a naive time is refused
REFUSED: list[tuple[str, Any, str, str]] = [
    ("topic", "", "is empty", "give it a name"),
    ("topic", None, "isn't text", "pass a str"),
    ("topic", "t" * 256, "256 characters, the limit is 255", "shorten it"),
    ("topic", "nul\0", "NUL", "remove it"),
    ("topic", "\udcff", "lone surrogate", "errors='replace'"),
    ("key", "k" * 513, "513 characters, the limit is 512", "shorten it"),
    ("tenant", "t" * 256, "the limit is 255", "shorten it"),
    ("content_type", 1, "isn't text", "pass a str"),
    ("content_type", "c" * 256, "the limit is 255", "shorten it"),
    ("headers", {"a": 1}, "isn't a mapping of str to str", "pass str for both"),
    ("headers", {1: "a"}, "isn't a mapping of str to str", "pass str for both"),
    ("headers", {"": "a"}, "empty name", "name the header"),
    ("headers", {"a\0": "b"}, "NUL", "remove it"),
    ("headers", {"a": "b\0"}, "NUL", "remove it"),
    ("headers", {"a": "\ud800"}, "lone surrogate", "errors='replace'"),
    ("headers", {"a": "ä" * 9000}, "over the limit of 16384 bytes", "payload"),
    ("payload", b"x" * (1024 * 1024 + 1), "over the limit of 1048576", "a reference"),
    ("id", uuid4(), "isn't a UUIDv7", "outbox.uuid7()"),
    ("id", str(uuid7()), "isn't a UUIDv7", "outbox.uuid7()"),
    ("id", UUID(int=uuid7().int ^ 1 << 63), "isn't a UUIDv7", "outbox.uuid7()"),
    ("id", id_of(NOW - timedelta(days=2)), "was made 2d", "make a new one"),
    ("id", id_of(NOW + timedelta(days=2)), "ahead of this clock", "make a new one"),
    ("schema_version", 0, "isn't a whole number from 1", "pass 1, 2"),
    ("schema_version", True, "isn't a whole number from 1", "pass 1, 2"),
    ("schema_version", "2", "isn't a whole number from 1", "pass 1, 2"),
    ("schema_version", 2**31, "isn't a whole number from 1", "pass 1, 2"),
    ("priority", "default", "isn't a Priority", "Priority.DEFAULT"),
    ("priority", 1, "isn't a Priority", "Priority.BULK"),
    ("available_at", NAIVE, "naive datetime", "datetime.now(UTC)"),
    ("available_at", "2030-01-01", "isn't a datetime", "aware datetime"),
    ("available_at", NOW + timedelta(days=7), "more than 6d", "add it later"),
    *(
        ("available_at", NOW + timedelta(days=29.5), "more than 6d", remedy)
        for remedy in (
            "limits=pillarbox.outbox.limits.Limits(max_delay=timedelta(days=30)))",
            "pillarbox retention set inbox.receipt 45d --minimum 31d",
        )
    ),
]


@pytest.mark.parametrize(
    ("field", "value", "problem", "remedy"),
    REFUSED,
    ids=[f"{field}: {problem}; {remedy}" for field, _, problem, remedy in REFUSED],
)
def test_the_error_for_a_violated_limit_names_field_value_and_remedy(
    field: str, value: Any, problem: str, remedy: str
) -> None:
    with pytest.raises(InvalidMessageError) as refusal:
        Limits().check(message(**{field: value}))

    text = str(refusal.value)
    assert refusal.value.field == field
    assert text.startswith(f"message {field} {shorten(refusal.value.value)}: ")
    assert problem in refusal.value.problem
    assert remedy in refusal.value.remedy
    assert len(text) < 400


def test_values_just_within_the_limits_pass() -> None:
    within: list[dict[str, Any]] = [
        {"topic": "t" * 255, "key": "k" * 512, "tenant": "t" * 255},
        {"topic": "\x01 ä😀\U0010ffff", "key": " ", "tenant": "\u2028"},
        {"payload": b""},
        {"payload": b"x" * 1024 * 1024},
        {"headers": {"traceparent": "00-1-2-03", "empty": ""}},
        {"headers": {"a": "x" * (16 * 1024 - 1)}},
        {"schema_version": 2**31 - 1},
        {"priority": Priority.REALTIME},
        {"available_at": NOW - timedelta(days=365)},
        {"available_at": NOW + timedelta(days=6)},
        {"id": id_of(NOW - timedelta(hours=23))},
    ]
    for fields in within:
        Limits().check(message(**fields))


def test_the_causation_id_is_indexed_and_so_bounded() -> None:
    Limits().check(message(headers={"causation-id": "x" * 2048, "other": "x" * 4096}))
    with pytest.raises(InvalidMessageError, match=r"header causation-id .*2049 bytes"):
        Limits().check(message(headers={"causation-id": "x" * 2049}))


def test_limits_can_be_raised_and_lowered_within_bounds() -> None:
    Limits(max_payload_bytes=2**21).check(message(payload=b"x" * 2**21))
    Limits(max_delay=timedelta(days=30)).check(
        message(available_at=NOW + timedelta(days=29))
    )
    with pytest.raises(InvalidMessageError, match="over the limit of 3 bytes"):
        Limits(max_payload_bytes=3).check(message(payload=b"four"))
    for size in (0, 64 * 2**20 + 1):
        with pytest.raises(ConfigError, match=r"max_payload_bytes=.*must"):
            Limits(max_payload_bytes=size)
    for delay in (timedelta(seconds=-1), timedelta(days=366)):
        with pytest.raises(ConfigError, match=r"max_delay=.*must"):
            Limits(max_delay=delay)
