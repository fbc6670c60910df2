"""A message that used up its attempts before is dead-lettered with its last error."""

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import pytest

from pillarbox import Consumer, Message
from pillarbox.inbox.events import HandlerFailed, MessageDeadLettered, MessageHandled
from pillarbox.inbox.poison.history import REDELIVERED, History, TakenOver
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.retry import RetryPolicy
from tests.fixtures.consumers import (
    NEVER,
    QUICK,
    async_sessions_of,
    consuming,
    handles,
    numbered,
    running,
)
from tests.fixtures.dead_letters import retry
from tests.fixtures.sessions import execute
from tests.fixtures.variants import in_turn
from tests.inbox.poison.test_policy import RedeliveringSource

ONCE = RetryPolicy(max_attempts=1)
LONG: Any = {"lease": timedelta(seconds=30)}
LETTERS = "SELECT attempts, error_reason, error_stacktrace FROM inbox.dead_letter"
SUSPECTS = "SELECT starts, is_open, error_reason FROM inbox.suspect"


def counted_by_the_broker(message: Message, attempts: int) -> MemorySource:
    source = MemorySource()
    source.add(message, attempts=attempts)
    return source


def with_history(make: Callable[[], History]) -> Callable[[Message, int], MemorySource]:
    def source_of(message: Message, _: int) -> MemorySource:
        source = RedeliveringSource(message)
        source.history = make()
        return source

    return source_of


SOURCES = {
    "counted by the broker": counted_by_the_broker,
    "redelivered": with_history(lambda: REDELIVERED),
    "taken over": with_history(lambda: TakenOver(10)),
}
KINDS_AND_SOURCES = pytest.mark.parametrize(
    ("kind", "source_of"),
    in_turn(
        [{}, {"batch": 2}, LONG],
        [pytest.param(source_of, id=name) for name, source_of in SOURCES.items()],
    ),
)


TOLD: Final[Any] = {"redact": str}
"""The consumer's setting with which the texts of errors are reported."""


async def decline(given: Any, messages: Any) -> None:
    raise ValueError("declined")


async def accept(given: Any, messages: Any) -> None:
    """Accept the message."""


async def fail_once(source: MemorySource, url: str, kind: Any) -> None:
    """Run a consumer that is stopped while the message waits for its next attempt."""
    async with consuming(url, source, decline, kind, **TOLD, retry=NEVER) as events:
        await events.wait_for(HandlerFailed)


@KINDS_AND_SOURCES
async def test_a_lower_limit_after_a_restart_keeps_the_last_error_and_its_trace(
    kind: dict[str, Any],
    source_of: Callable[[Message, int], MemorySource],
    database_url: str,
) -> None:
    (message,) = numbered(1)
    for attempts in range(4):
        await fail_once(source_of(message, attempts), database_url, kind)
    source = source_of(message, 4)
    async with consuming(
        database_url, source, accept, kind, **TOLD, retry=QUICK
    ) as events:
        (given_up,) = await events.wait_for(MessageDeadLettered)

    assert given_up.attempts == 4
    assert given_up.reason == "ValueError: declined"
    assert given_up.stacktrace is not None
    assert 'raise ValueError("declined")' in given_up.stacktrace
    ((attempts, reason, trace),) = execute(database_url, LETTERS)
    assert (attempts, reason, trace) == (4, given_up.reason, given_up.stacktrace)
    assert execute(database_url, SUSPECTS) == []
    assert source.acked == [message]


@KINDS_AND_SOURCES
async def test_a_message_that_is_handled_after_a_restart_leaves_no_error(
    kind: dict[str, Any],
    source_of: Callable[[Message, int], MemorySource],
    database_url: str,
) -> None:
    (message,) = numbered(1)
    await fail_once(source_of(message, 0), database_url, kind)
    assert len(execute(database_url, SUSPECTS)) == 1
    async with consuming(database_url, source_of(message, 1), accept, kind) as events:
        await events.wait_for(MessageHandled)
    assert execute(database_url, SUSPECTS) == []


@pytest.mark.parametrize("kind", [{}, {"batch": 2}], ids=str)
async def test_a_replica_with_a_lower_limit_finds_the_error_of_another(
    kind: dict[str, Any], database_url: str
) -> None:
    (message,) = numbered(1)
    first, second = RedeliveringSource(message), RedeliveringSource(message)
    async with consuming(
        database_url, first, decline, kind, **TOLD, retry=NEVER
    ) as failures:
        await failures.wait_for(HandlerFailed)
        # As if the first were killed now: it has kept the error already.
        assert execute(database_url, SUSPECTS) == [(1, False, "ValueError: declined")]
        async with consuming(
            database_url, second, accept, kind, **TOLD, retry=ONCE
        ) as events:
            (given_up,) = await events.wait_for(MessageDeadLettered)
    assert given_up.reason == "ValueError: declined"


async def test_a_job_that_ended_without_a_dead_letter_keeps_its_error(
    database_url: str,
) -> None:
    (message,) = numbered(1)
    await fail_once(MemorySource(message), database_url, LONG)
    # As if the process had died between the two.
    execute(database_url, "UPDATE inbox.job SET state = 'failure', finished_at = now()")
    async with consuming(
        database_url, MemorySource(message), accept, LONG, **TOLD
    ) as events:
        (given_up,) = await events.wait_for(MessageDeadLettered)
    assert (given_up.attempts, given_up.reason) == (1, "ValueError: declined")
    assert given_up.stacktrace is not None
    assert execute(database_url, SUSPECTS) == []


async def test_a_retry_whose_process_died_leaves_the_error_of_the_dead_letter(
    database_url: str,
) -> None:
    (message,) = numbered(1)
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(MemorySource(message), sessions, name="billing", retry=ONCE)
        handles(consumer, "*", **LONG)(decline)
        async with running(consumer) as events:
            await events.wait_for(MessageDeadLettered)
        before = execute(database_url, LETTERS)
        execute(
            database_url,
            "UPDATE inbox.job SET state = 'in_progress', finished_at = NULL,"
            " attempts = 1, lease_until = now() - interval '1 second'",
        )
        assert await retry(consumer.retrier()) == Counter(failed=1)
    assert execute(database_url, LETTERS) == before
