"""A key is blocked from the first failure of its head until the head's outcome."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from pillarbox import uuid7
from pillarbox.inbox.consuming.blocked_keys import BlockedKeys, WaitingMessage
from pillarbox.inbox.events import (
    ConsumerStopped,
    DeadLetterRepeated,
    DeliveryEvent,
    DeliveryReturned,
    DuplicateSkipped,
    HandlerFailed,
    MessageCancelled,
    MessageDeadLettered,
    MessageHandled,
    RetryRequested,
)

START = datetime(2026, 1, 31, 12, tzinfo=UTC)
HEAD = uuid7()


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = START.timestamp()

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keys(clock: Clock) -> BlockedKeys:
    return BlockedKeys(clock)


def fields_of(id: UUID = HEAD, key: str | None = "customer 7") -> dict[str, Any]:
    return {"consumer": "billing", "id": id, "topic": "orders", "key": key}


def failed(attempts: int = 1, **changes: Any) -> HandlerFailed:
    return HandlerFailed(
        **fields_of(**changes), attempts=attempts, reason="no", seconds_until_retry=3.0
    )


def later() -> RetryRequested:
    return RetryRequested(**fields_of(), reason="soon", seconds_until_retry=60.0)


def test_a_key_is_blocked_since_the_first_failure_of_its_head(
    keys: BlockedKeys, clock: Clock
) -> None:
    keys(failed())
    clock.now += 10
    keys(failed(2))
    clock.now += 10
    keys(later())
    assert keys.oldest_first() == [
        WaitingMessage(
            key="customer 7",
            since=START,
            next_at=START + timedelta(seconds=80),
            reason=f"orders {HEAD}: no",
        )
    ]


@pytest.mark.parametrize(
    "outcome",
    [
        MessageHandled(**fields_of(), seconds=0.1),
        DuplicateSkipped(**fields_of()),
        MessageCancelled(**fields_of()),
        MessageDeadLettered(**fields_of(), attempts=8, reason="no"),
        DeadLetterRepeated(**fields_of()),
        DeliveryReturned(**fields_of()),
        ConsumerStopped(consumer="billing", returned=0),
    ],
    ids=lambda event: type(event).__name__,
)
def test_every_outcome_of_the_head_unblocks_the_key(
    keys: BlockedKeys, outcome: DeliveryEvent | ConsumerStopped
) -> None:
    keys(failed())
    keys(outcome)
    assert keys.oldest_first() == []


def test_a_message_without_a_key_blocks_no_key(keys: BlockedKeys) -> None:
    keys(failed(key=None))
    keys(MessageHandled(**fields_of(uuid7()), seconds=0.1))
    assert [waiting.key for waiting in keys.oldest_first()] == [None]


def test_the_longest_waiting_key_comes_first(keys: BlockedKeys, clock: Clock) -> None:
    keys(failed())
    clock.now += 1
    keys(failed(id=uuid7(), key="customer 8"))
    clock.now += 1
    keys(failed(5))
    assert [blocked.key for blocked in keys.oldest_first()] == [
        "customer 7",
        "customer 8",
    ]
