"""Retries publish dead letters of the outbox, each in one retry at a time."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest

from pillarbox import Message
from pillarbox.outbox.dead_letters.criteria import Criteria
from pillarbox.outbox.dead_letters.events import (
    DeadLetterFailed,
    DeadLetterSucceeded,
)
from pillarbox.outbox.dead_letters.retry import Outcome, retry_all
from pillarbox.outbox.dead_letters.schedule import RetrySchedule, Scheduler
from pillarbox.outbox.errors import BrokerUnavailableError, DatabaseUnavailableError
from pillarbox.outbox.lane import Priority
from pillarbox.outbox.payload.payload_codec import encoded
from pillarbox.outbox.testing.events import RecordedEvents
from pillarbox.relay.config import RelayConfig
from pillarbox.relay.dead_letters.retry import PublishingRetrier
from pillarbox.relay.publisher import Acked, Confirmation, Nacked
from tests.fixtures.dead_letters import find, give_up, states
from tests.fixtures.foreign_messages import DEEP
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import end_sessions
from tests.fixtures.sessions import execute

pytestmark = pytest.mark.timeout(180)

PENDING = Criteria()


class Backwards:
    """A codec that reverses the payload."""

    name = "backwards"

    def encode(self, message: Message) -> tuple[str, bytes]:
        return "1", message.payload[::-1]

    def decode(self, message: Message, key_id: str) -> bytes:
        return message.payload[::-1]


class Workbench:
    """A scripted publisher, and retriers that publish through it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.publisher = ScriptedPublisher()
        self.events = RecordedEvents()

    @asynccontextmanager
    async def retrier(
        self, schedule: RetrySchedule | None = None
    ) -> AsyncIterator[PublishingRetrier]:
        async with PublishingRetrier(
            self.url,
            lambda: self.publisher,
            schedule=schedule,
            notify=self.events,
        ) as opened:
            yield opened

    async def retry_all(self, schedule: RetrySchedule | None = None) -> Counter[str]:
        async with self.retrier(schedule) as retrier:
            return await retry_all(retrier, await find(retrier, PENDING))

    def scheduler(self, **changes: object) -> Scheduler:
        return Scheduler(
            self.retrier,
            RetrySchedule(**changes),  # type: ignore[arg-type]
            schema="outbox",
            origin=None,
            notify=self.events,
        )


@pytest.fixture
def bench(database_url: str) -> Workbench:
    return Workbench(database_url)


async def test_an_acked_retry_succeeds_with_the_message_as_it_was(
    bench: Workbench,
) -> None:
    message = Message(
        "orders",
        {"order": 1},
        key="k",
        tenant="acme",
        headers={"traceparent": "00-1"},
        schema_version=3,
        priority=Priority.REALTIME,
    )
    give_up(bench.url, message)

    assert await bench.retry_all() == Counter(succeeded=1)

    assert bench.publisher.acked == [message]
    assert states(bench.url) == [("SUCCEEDED", 0, "refused")]
    (event,) = bench.events.of(DeadLetterSucceeded)
    assert event.message_id == str(message.id)


async def test_an_encoded_payload_is_decoded_for_the_broker_and_stored_encoded(
    bench: Workbench,
) -> None:
    message = Message("orders", {"secret": 1}, key="k")
    give_up(bench.url, encoded(message, Backwards()))
    config = RelayConfig(codec=Backwards())
    async with PublishingRetrier(
        bench.url, lambda: bench.publisher, config=config
    ) as retrier:
        found = await find(retrier, PENDING)
        assert await retry_all(retrier, found) == Counter(succeeded=1)
    (published,) = bench.publisher.acked
    assert published.json() == {"secret": 1}
    query = "SELECT payload FROM outbox.dead_letter"
    assert execute(bench.url, query) == [(message.payload[::-1],)]


async def test_a_nacked_retry_is_charged_and_waits_with_a_new_reason(
    bench: Workbench,
) -> None:
    give_up(bench.url, Message("orders", b""), stacktrace="an old one")
    bench.publisher.script = lambda message: Nacked("still\0not", permanent=True)

    assert await bench.retry_all() == Counter(failed=1)

    assert states(bench.url) == [("PENDING", 1, r"still\0not")]
    assert execute(
        bench.url,
        "SELECT retry_after > now() + interval '1 minute', error_stacktrace"
        " FROM outbox.dead_letter",
    ) == [(True, None)]
    (event,) = bench.events.of(DeadLetterFailed)
    assert event.retry_count == 1


async def test_a_publisher_that_raises_has_refused_the_message(
    bench: Workbench,
) -> None:
    def stumble(message: Message) -> Confirmation:
        raise KeyError(message.topic)

    give_up(bench.url, Message("orders", b""))
    bench.publisher.script = stumble

    assert await bench.retry_all() == Counter(failed=1)

    ((status, count, reason),) = states(bench.url)
    assert (status, count) == ("PENDING", 1)
    assert reason.startswith("KeyError: raised in ")


async def test_a_postponed_retry_is_not_charged(bench: Workbench) -> None:
    give_up(bench.url, Message("orders", b""))
    answer = Nacked("later", retry_after=timedelta(hours=3))
    bench.publisher.script = lambda message: answer

    await bench.retry_all(RetrySchedule(max_retries=1))

    assert states(bench.url) == [("PENDING", 0, "later")]
    query = "SELECT retry_after > now() + interval '2 hours' FROM outbox.dead_letter"
    assert execute(bench.url, query) == [(True,)]


async def test_after_the_last_scheduled_retry_only_a_manual_retry_is_possible(
    bench: Workbench,
) -> None:
    give_up(bench.url, Message("orders", b""))
    bench.publisher.script = lambda message: Nacked("no")

    await bench.retry_all(RetrySchedule(max_retries=1))

    query = "SELECT status, retry_after FROM outbox.dead_letter"
    assert execute(bench.url, query) == [("PENDING", None)]
    assert await bench.scheduler().run_due() == Counter()
    bench.publisher.script = lambda message: Acked()
    assert await bench.retry_all() == Counter(succeeded=1)


async def test_an_unavailable_broker_costs_no_attempt(bench: Workbench) -> None:
    give_up(bench.url, *[Message("orders", b"") for _ in range(3)])
    calls: list[Message] = []

    def fail_after_the_first(message: Message) -> Confirmation:
        calls.append(message)
        if len(calls) > 1:
            raise BrokerUnavailableError("gone again")
        return Acked()

    bench.publisher.script = fail_after_the_first
    with pytest.raises(BrokerUnavailableError, match="gone again"):
        await bench.retry_all()
    assert [state[:2] for state in sorted(states(bench.url))] == [
        ("PENDING", 0),
        ("PENDING", 0),
        ("SUCCEEDED", 0),
    ]


async def test_the_dead_letter_of_a_foreign_message_cannot_be_published(
    bench: Workbench,
) -> None:
    give_up(bench.url, Message("orders", b""), message_id="stripe-17")
    give_up(bench.url, Message("orders", b""), headers="[]")
    give_up(bench.url, Message("orders", b""), topic="")
    give_up(bench.url, Message("orders", b""), headers=DEEP)
    give_up(bench.url, Message("orders", b""), headers='{"ce-tenant": "forged"}')

    assert await bench.retry_all() == Counter(failed=5)

    reasons = [reason for _, _, reason in states(bench.url)]
    assert [reason.split(":")[0] for reason in sorted(reasons)] == [
        "message headers 'ce-tenant'",
        "message headers 'not shown",
        "message headers []",
        "message id 'stripe-17'",
        "message topic ''",
    ]
    assert bench.publisher.calls == []


async def test_a_dead_letter_that_is_being_retried_is_skipped_by_others(
    bench: Workbench,
) -> None:
    give_up(bench.url, Message("orders", b""))
    bench.publisher.open.clear()
    async with bench.retrier() as one, bench.retrier() as other:
        (candidate,) = await find(one, PENDING)
        first = asyncio.create_task(one.retry(candidate))
        await bench.publisher.until(lambda: bool(bench.publisher.calls))
        assert await other.retry(candidate) is Outcome.SKIPPED
        bench.publisher.open.set()
        assert await first is Outcome.SUCCEEDED
        assert await other.retry(candidate) is Outcome.SKIPPED
    assert len(bench.publisher.acked) == 1


async def test_an_interrupted_retry_leaves_the_dead_letter_unchanged(
    bench: Workbench,
) -> None:
    give_up(bench.url, Message("orders", b""))
    bench.publisher.open.clear()
    retrying = asyncio.create_task(bench.retry_all())
    await bench.publisher.until(lambda: bool(bench.publisher.calls))
    end_sessions(bench.url, "dead letters")
    bench.publisher.open.set()
    with pytest.raises(DatabaseUnavailableError):
        await retrying
    assert states(bench.url) == [("PENDING", 0, "refused")]


async def test_a_scheduled_run_retries_due_dead_letters_up_to_its_batch_size(
    bench: Workbench,
) -> None:
    give_up(bench.url, *[Message("orders", b"") for _ in range(7)])
    give_up(bench.url, Message("later", b""))
    execute(
        bench.url,
        "UPDATE outbox.dead_letter SET retry_after = now() + interval '1 hour'"
        " WHERE topic = 'later'",
    )
    scheduler = bench.scheduler(batch=5)

    assert await scheduler.run_due() == Counter(succeeded=5)
    assert await scheduler.run_due() == Counter(succeeded=2)
    assert await scheduler.run_due() == Counter()


async def test_what_an_unavailable_broker_left_over_is_retried_in_the_next_run(
    bench: Workbench,
) -> None:
    give_up(bench.url, Message("orders", b""))
    bench.publisher.away = "gone fishing"
    scheduler = bench.scheduler(interval=timedelta(hours=6))
    with pytest.raises(BrokerUnavailableError):
        await scheduler.run_due()
    bench.publisher.away = None

    assert await scheduler.run_due() == Counter()
    pass_time = "UPDATE outbox.dead_letter SET retry_after = retry_after - %s"
    execute(bench.url, pass_time, (timedelta(hours=6),))
    assert await scheduler.run_due() == Counter(succeeded=1)
