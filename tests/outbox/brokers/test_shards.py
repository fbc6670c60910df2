"""A topic's shards: their names, and which of them holds a message."""

from collections import Counter
from hashlib import sha256
from uuid import UUID

import pytest

from pillarbox import Message
from pillarbox.outbox.brokers.shards import MOST_SHARDS, Shard


def message(key: str | None, id: UUID | None = None) -> Message:
    """Return a message of a key."""
    return Message("orders", b"", key=key, id=id)


@pytest.mark.parametrize(
    ("name", "shard"),
    [
        ("orders", Shard("orders", 1, 1)),
        ("orders.shard-3-of-8", Shard("orders", 3, 8)),
        ("orders.placed.shard-64-of-64", Shard("orders.placed", 64, 64)),
        ("a\nb.shard-1-of-2", Shard("a\nb", 1, 2)),
        ("o.shard-1-of-2.shard-2-of-3", Shard("o.shard-1-of-2", 2, 3)),
    ],
)
def test_a_shard_is_known_by_its_name(name: str, shard: Shard) -> None:
    assert Shard.named(name) == shard
    assert shard.name == name


@pytest.mark.parametrize(
    "name",
    [
        "orders.shard-0-of-8",
        "orders.shard-9-of-8",
        "orders.shard-1-of-1",
        "orders.shard-1-of-65",
        "orders.shard-01-of-8",
        "orders.shard-1-of-8 ",
        "orders.shard-1-of-٨",
        ".shard-1-of-8",
        "orders.shard-1-of-8.dlq",
    ],
)
def test_any_other_name_is_that_of_a_topic(name: str) -> None:
    assert Shard.named(name) == Shard(name)


def test_the_only_shard_is_the_topic_itself() -> None:
    assert Shard.holding(message("k"), 1).name == "orders"
    assert Shard.holding(message(None), 1).name == "orders"


@pytest.mark.parametrize("of", [2, 3, 8, MOST_SHARDS])
def test_all_shards_are_used_evenly_with_and_without_keys(of: int) -> None:
    each = 200
    with_key = Counter(Shard.holding(message(f"k{i}"), of) for i in range(each * of))
    without = Counter(Shard.holding(message(None), of) for _ in range(each * of))
    expected = {*Shard("orders", of=of).all}
    assert len(expected) == of
    assert set(with_key) == set(without) == expected
    for counts in (with_key, without):
        assert min(counts.values()) > each / 2
        assert max(counts.values()) < each * 2


def test_a_key_is_always_in_the_same_shard() -> None:
    assert {Shard.holding(message("key-ä"), 8).number for _ in range(100)} == {
        int.from_bytes(sha256("key-ä".encode()).digest()[:8], "big") % 8 + 1
    }


def test_a_message_without_a_key_is_published_again_to_the_same_shard() -> None:
    id = message(None).id
    assert len({Shard.holding(message(None, id), 8) for _ in range(100)}) == 1
