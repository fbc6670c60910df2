"""Spans of handlers, however they are called, and of the outcomes of their messages."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from opentelemetry.trace import Span, SpanKind, StatusCode, get_current_span
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from pillarbox import Consumer, Message, RetryLater, add, guard, idempotent
from pillarbox.inbox.events import (
    DuplicateSkipped,
    HandlerFailed,
    MessageDeadLettered,
    MessageHandled,
    RetryRequested,
)
from pillarbox.inbox.jobs.job import AsyncJob
from pillarbox.inbox.receipt import ForeignId
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.retry import RetryPolicy
from pillarbox.outbox.testing.samples import TRACEPARENT
from tests.fixtures.consumers import (
    QUICK,
    async_sessions_of,
    consuming,
    running,
    sessions_of,
)
from tests.fixtures.spans import (
    Record,
    Spans,
    attributes_of,
    context_of,
    parent_of,
    traceparent_of,
)
from tests.fixtures.webhook import hook_app, post, request_of, served

LONG: Any = {"lease": timedelta(seconds=30)}
TRACE, PARENT = int(TRACEPARENT[3:35], 16), int(TRACEPARENT[36:52], 16)


def message(payload: bytes = b"1", topic: str = "orders", **changes: Any) -> Message:
    headers = {"traceparent": TRACEPARENT}
    return Message(topic, payload, **({"headers": headers} | changes))


def outcome(span: Any) -> str:
    return str(attributes_of(span)["pillarbox.outcome"])


async def accept(session: AsyncSession, message: Message) -> None:
    """Accept the message."""


async def test_the_span_of_a_handler_continues_the_messages_trace(
    database_url: str, spans: Spans
) -> None:
    one = message()
    async with consuming(database_url, MemorySource(one), accept) as events:
        await events.wait_for(MessageHandled)
    span = spans.one("process orders")
    assert span.kind is SpanKind.CONSUMER
    assert (context_of(span).trace_id, parent_of(span)) == (TRACE, PARENT)
    assert [link.context.span_id for link in span.links] == [PARENT]
    assert attributes_of(span) == {
        "messaging.system": "memory",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "orders",
        "messaging.consumer.group.name": "billing",
        "messaging.message.id": str(one.id),
        "pillarbox.outcome": "handled",
    }
    assert span.status.status_code is StatusCode.UNSET


async def test_each_queue_names_its_own_broker(database_url: str, spans: Spans) -> None:
    class AcmeSource(MemorySource):
        pass

    sources = {
        "default": MemorySource(message()),
        "other": AcmeSource(message(topic="bills")),
    }
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(sources, sessions, name="billing")
        consumer.handles("orders")(accept)
        consumer.handles("bills", queue="other")(accept)
        async with running(consumer) as events:
            await events.wait_for(MessageHandled, 2)
    named = {
        topic: attributes_of(spans.one(f"process {topic}"))["messaging.system"]
        for topic in ("orders", "bills")
    }
    assert named == {"orders": "memory", "bills": "acme"}


async def test_each_attempt_retry_and_dead_letter_has_a_span(
    database_url: str, spans: Spans
) -> None:
    async def fail(session: AsyncSession, message: Message) -> None:
        raise ValueError("no such shop")

    source = MemorySource(message())
    async with consuming(database_url, source, fail, retry=QUICK) as events:
        (given_up,) = await events.wait_for(MessageDeadLettered)
    retried = events.of(HandlerFailed)
    attempts = spans.named("process orders")
    assert [outcome(span) for span in attempts] == ["failed"] * 3
    for span in attempts:
        assert span.status.status_code is StatusCode.ERROR
        # The text of a handler's error could quote the payload.
        assert (span.status.description, span.events) == (None, ())
        assert attributes_of(span)["error.type"] == "ValueError"
    settled = [*spans.named("retry orders"), spans.one("dead_letter orders")]
    told: list[HandlerFailed | MessageDeadLettered] = [*retried, given_up]
    for span, event in zip(settled, told, strict=True):
        assert (context_of(span).trace_id, parent_of(span)) == (TRACE, PARENT)
        assert span.status.description == event.reason
        about = attributes_of(span)
        assert about["messaging.operation.type"] == "settle"
        assert about["messaging.consumer.group.name"] == "billing"
        assert about["messaging.message.id"] == str(event.id)
        assert about["pillarbox.attempts"] == event.attempts
        assert event.traceparent == TRACEPARENT


@pytest.mark.parametrize("group", [False, True])
async def test_a_handler_that_asks_for_a_retry_has_not_failed(
    group: bool, database_url: str, spans: Spans
) -> None:
    calls = 0
    asked = RetryLater(timedelta(seconds=1))

    async def later(session: AsyncSession, message: Message) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ExceptionGroup("tasks", [asked]) if group else asked

    async with consuming(database_url, MemorySource(message()), later) as events:
        await events.wait_for(MessageHandled)
    assert len(events.of(RetryRequested)) == 1
    first, second = spans.named("process orders")
    assert (outcome(first), outcome(second)) == ("retry", "handled")
    retry = spans.one("postpone orders")
    assert attributes_of(retry)["pillarbox.retry_delay"] == 1
    for span in (first, retry):
        assert span.status.status_code is StatusCode.UNSET


async def test_a_batch_handler_has_one_span_linked_to_each_message(
    database_url: str, spans: Spans
) -> None:
    batch = [
        message(headers={"traceparent": f"00-{n:032x}-{n:016x}-01"})
        for n in range(1, 21)
    ]
    sizes: list[int] = []

    async def handle(session: AsyncSession, messages: Sequence[Message]) -> None:
        sizes.append(len(messages))
        add(session, Message("bills", len(messages)))

    source, terms = MemorySource(*batch), {"batch": 100}
    async with consuming(database_url, source, handle, terms) as events:
        await events.wait_for(MessageHandled, 20)
    processed, made = spans.named("process orders"), spans.named("create bills")
    linked = [link.context.trace_id for span in processed for link in span.links]
    assert sorted(linked) == list(range(1, 21))
    for size, span, create in zip(sizes, processed, made, strict=True):
        assert parent_of(create) == context_of(span).span_id
        if size > 1:
            assert attributes_of(span)["messaging.batch.message_count"] == size
            assert span.parent is None


async def test_a_long_handler_has_one_span_over_all_its_transactions(
    database_url: str, spans: Spans
) -> None:
    async def report(job: AsyncJob, message: Message) -> None:
        for n in range(2):
            async with job.transaction() as session:
                add(session, Message("bills", n))

    source = MemorySource(message())
    async with consuming(database_url, source, report, LONG) as events:
        await events.wait_for(MessageHandled)
    processed = spans.one("process orders")
    assert (context_of(processed).trace_id, parent_of(processed)) == (TRACE, PARENT)
    made = spans.named("create bills")
    assert [parent_of(span) for span in made] == [context_of(processed).span_id] * 2


async def test_a_timed_out_long_handler_has_failed_and_a_stopped_one_has_not(
    database_url: str, spans: Spans
) -> None:
    started = asyncio.Event()

    async def wait(job: AsyncJob, message: Message) -> None:
        started.set()
        await asyncio.Event().wait()

    async with consuming(database_url, MemorySource(message()), wait, LONG):
        await started.wait()
    source = MemorySource(message(topic="late"))
    terms = {"time_limit": timedelta(milliseconds=50), **LONG}
    once = RetryPolicy(max_attempts=1)
    async with consuming(database_url, source, wait, terms, retry=once) as events:
        await events.wait_for(MessageDeadLettered)
    stopped, late = spans.one("process orders"), spans.one("process late")
    assert (outcome(stopped), outcome(late)) == ("cancelled", "failed")
    assert stopped.status.status_code is StatusCode.UNSET
    assert (
        attributes_of(late)["error.type"]
        == "pillarbox.inbox.errors.HandlerTimeoutError"
    )


@pytest.mark.parametrize("times", [1, 2])
def test_an_idempotent_handler_has_a_span_wherever_it_is_called(
    times: int, database_url: str, spans: Spans
) -> None:
    @idempotent(consumer="billing")
    def bill(session: Session, message: Message) -> str:
        return traceparent_here()

    with sessions_of(database_url) as sessions:
        one = message()
        said: str | None = None
        for _ in range(times):
            with sessions.begin() as session:
                said = bill(session, one)
    outcomes = ["handled", "duplicate"][:times]
    found = spans.named("process orders")
    assert [outcome(span) for span in found] == outcomes
    assert {parent_of(span) for span in found} == {PARENT}
    assert said == (traceparent_of(found[0]) if times == 1 else None)


async def add_bill(session: AsyncSession, message: Message) -> None:
    add(session, Message("bills", 1))


async def test_each_delivery_has_one_span_and_a_duplicates_says_so(
    database_url: str, spans: Spans
) -> None:
    one = message()
    async with consuming(database_url, MemorySource(one, one), add_bill) as events:
        await events.wait_for(MessageHandled)
        await events.wait_for(DuplicateSkipped)
    found = spans.named("process orders")
    assert sorted(map(outcome, found)) == ["duplicate", "handled"]
    (handled,) = (span for span in found if outcome(span) == "handled")
    assert parent_of(spans.one("create bills")) == context_of(handled).span_id


async def test_guards_of_several_consumers_in_one_handler_have_their_own_spans(
    database_url: str, spans: Spans
) -> None:
    async def handle(session: AsyncSession, message: Message) -> None:
        for consumer in ("billing", "shipping", "billing"):
            async with guard(session, message.id, consumer=consumer):
                pass

    source = MemorySource(message())
    async with consuming(database_url, source, handle, name="shop") as events:
        await events.wait_for(MessageHandled)
    delivery = spans.one("process orders")
    assert outcome(delivery) == "handled"
    inner = spans.named("process")
    assert {parent_of(span) for span in inner} == {context_of(delivery).span_id}
    assert list(map(outcome, inner)) == ["handled", "handled", "duplicate"]


async def test_the_block_of_a_guard_has_a_span(database_url: str, spans: Spans) -> None:
    one = message()
    with sessions_of(database_url) as plain:
        for _ in range(2):
            with (
                plain.begin() as session,
                guard(session, one.id, consumer="a", headers=one.headers) as is_new,
            ):
                if is_new:
                    add(session, Message("bills", 1))
    foreign = ForeignId("stripe", "evt_1")
    async with async_sessions_of(database_url) as sessions:
        async with sessions.begin() as session_, guard(session_, foreign, consumer="a"):
            add(session_, Message("bills", 2))
        with pytest.raises(ValueError, match="wrong"):
            async with (
                sessions.begin() as session_,
                guard(session_, foreign, consumer="b"),
            ):
                raise ValueError("wrong")
    found = spans.named("process")
    assert list(map(outcome, found)) == ["handled", "duplicate", "handled", "failed"]
    first, second, of_stripe, failed = found
    assert {parent_of(first), parent_of(second)} == {PARENT}
    ids = [attributes_of(span)["messaging.message.id"] for span in found]
    assert ids == [str(one.id), str(one.id), "evt_1", "evt_1"]
    assert attributes_of(failed)["error.type"] == "ValueError"
    made = spans.named("create bills")
    assert [parent_of(span) for span in made] == [
        context_of(first).span_id,
        context_of(of_stripe).span_id,
    ]
    assert get_current_span().get_span_context().is_valid is False


async def test_a_webhook_is_handled_in_the_senders_trace(
    database_url: str, spans: Spans
) -> None:
    one = message()
    async with async_sessions_of(database_url) as sessions:
        app = hook_app(accept, sessions)
        async with served(app) as hook:
            for _ in range(2):
                status, *_ = await post(hook, request_of(one), one.payload)
                assert status == 204
    found = spans.named("process orders")
    assert list(map(outcome, found)) == ["handled", "duplicate"]
    for span in found:
        assert parent_of(span) == PARENT
        assert attributes_of(span)["messaging.system"] == "http"


def add_another(session: Session, message: Message) -> None:
    """Add a message in the handler's thread."""
    add(session, Message("orders.accepted", message.payload))


@pytest.mark.parametrize("handler", [accept, add_another])
async def test_a_failing_attributes_function_is_logged_and_fails_no_handler(
    database_url: str, record: Record, handler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def describe(_: Message) -> dict[str, str]:
        raise RuntimeError("not describable")

    record(attributes=describe)
    async with consuming(database_url, MemorySource(message()), handler) as events:
        await events.wait_for(MessageHandled)
    assert "TracingFailed reason='RuntimeError: raised in test_a_fai" in caplog.text
    assert "not describable" not in caplog.text


def traceparent_here() -> str:
    at = get_current_span().get_span_context()
    return f"00-{at.trace_id:032x}-{at.span_id:016x}-{at.trace_flags:02x}"


def span_id(span: Span) -> int:
    return span.get_span_context().span_id
