"""Spans of messages that the relay publishes, retries and dead-letters."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import SpanKind, StatusCode

from pillarbox import Message
from pillarbox.outbox.errors import BrokerUnavailableError
from pillarbox.outbox.log.lanes.batch import ClaimedMessage
from pillarbox.relay.adaptive_batch import BatchLimit
from pillarbox.relay.config import RelayConfig
from pillarbox.relay.events import MessageDeadLettered
from pillarbox.relay.publish import publish_batch
from pillarbox.relay.publisher import Acked, Confirmation, Nacked
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import insert, running
from tests.fixtures.spans import (
    Broken,
    Record,
    Spans,
    attributes_of,
    context_of,
    parent_of,
)

CONFIG = RelayConfig()


def in_trace(number: int, topic: str = "orders", flags: str = "01") -> Message:
    parent = f"00-{number + 1:032x}-{number + 1:016x}-{flags}"
    return Message(topic, b"%d" % number, headers={"traceparent": parent})


async def publish(
    messages: Sequence[Message], publisher: ScriptedPublisher | None = None
) -> list[Message]:
    """Publish as the relay does; return the messages passed to the publisher."""
    publisher = publisher or ScriptedPublisher()
    rows = [
        ClaimedMessage(0, n, m.id, None, 0, m.key, m.topic, m, None)  # type: ignore[arg-type]
        for n, m in enumerate(messages)
    ]
    await publish_batch(
        rows,
        publisher,
        CONFIG,
        batch_limit=BatchLimit(CONFIG.publish_timeout),
        leased=lambda: True,
        notify=lambda _: None,
    )
    return [message for call in publisher.calls for message in call]


async def test_a_single_message_is_sent_within_its_own_trace(spans: Spans) -> None:
    message = in_trace(6)
    assert await publish([message]) == [message]
    sent = spans.one("send orders")
    assert sent.kind is SpanKind.CLIENT
    assert (context_of(sent).trace_id, parent_of(sent)) == (7, 7)
    assert [link.context.span_id for link in sent.links] == [7]
    assert attributes_of(sent) == {
        "messaging.system": "scripted",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "orders",
        "messaging.message.id": str(message.id),
    }


async def test_a_batch_is_one_span_linked_with_each_message(spans: Spans) -> None:
    batch = [in_trace(n) for n in range(50)]
    assert await publish(batch) == batch
    sent = spans.one("send orders")
    assert sent.parent is None
    assert [link.context.trace_id for link in sent.links] == list(range(1, 51))
    about = attributes_of(sent)
    assert about["messaging.batch.message_count"] == 50
    assert about["messaging.destination.name"] == "orders"
    assert "messaging.message.id" not in about

    # A batch of several topics names none.
    await publish([in_trace(1, "orders"), in_trace(2, "bills")])
    assert "messaging.destination.name" not in attributes_of(spans.one("send"))

    # A message without a context is sent as it is.
    bare = Message("t", b"")
    assert await publish([bare]) == [bare]
    assert spans.one("send t").links == ()


async def test_a_batch_with_too_many_links_for_one_span_gets_several_spans(
    spans: Spans,
) -> None:
    batch = [in_trace(n) for n in range(300)]
    assert await publish(batch) == batch
    sent = spans.named("send orders")
    linked = sorted(link.context.trace_id for span in sent for link in span.links)
    assert linked == list(range(1, 301))
    counts = [attributes_of(s)["messaging.batch.message_count"] for s in sent]
    assert sorted(counts) == [44, 128, 128]


async def test_messages_that_are_not_sampled_are_not_linked(spans: Spans) -> None:
    batch = [in_trace(n, flags="01" if n % 100 == 0 else "00") for n in range(300)]
    await publish(batch)
    sent = spans.one("send orders")
    assert [link.context.trace_id for link in sent.links] == [1, 101, 201]


async def test_a_single_message_that_is_not_sampled_has_no_span(
    record: Record,
) -> None:
    spans = record(sampler=ParentBased(ALWAYS_OFF))
    await publish([in_trace(1, flags="00")])
    assert spans.all() == ()


async def test_the_span_is_current_while_waiting_for_the_broker(
    spans: Spans,
) -> None:
    def answer(message: Message) -> Confirmation:
        with spans.tracer.start_as_current_span("the broker's client"):
            return Acked()

    await publish([in_trace(1)], ScriptedPublisher(answer))
    client, sent = spans.one("the broker's client"), spans.one("send orders")
    assert parent_of(client) == context_of(sent).span_id


async def test_an_unavailable_broker_fails_the_span(spans: Spans) -> None:
    publisher = ScriptedPublisher()
    publisher.away = "no route"
    with suppress(BrokerUnavailableError):
        await publish([in_trace(1)], publisher)
    sent = spans.one("send orders")
    assert sent.status.status_code is StatusCode.ERROR
    error = attributes_of(sent)["error.type"]
    assert error == "pillarbox.outbox.errors.BrokerUnavailableError"


async def test_a_batch_says_how_many_messages_were_refused(spans: Spans) -> None:
    def answer(message: Message) -> Confirmation:
        return Nacked("no") if message.payload == b"1" else Acked()

    await publish([in_trace(n) for n in range(3)], ScriptedPublisher(answer))
    sent = spans.one("send orders")
    assert attributes_of(sent)["pillarbox.refused"] == 1
    assert sent.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("key", ["a", None])
async def test_refusals_and_dead_letters_appear_in_the_messages_trace(
    key: str | None, database_url: str, spans: Spans
) -> None:
    publisher = ScriptedPublisher(lambda _: Nacked("too hot"))
    with spans.tracer.start_as_current_span("request"):
        await asyncio.to_thread(insert, database_url, Message("orders", b"1", key=key))
    async with running(database_url, publisher) as relay:
        await relay.events.wait_for(MessageDeadLettered)

    created = spans.one("create orders")
    retries, (given_up,) = (
        spans.named("retry orders"),
        spans.named("dead_letter orders"),
    )
    assert len(retries) == 2
    assert len(spans.named("send orders")) == 3
    for span in (*retries, given_up):
        assert span.kind is SpanKind.CLIENT
        assert parent_of(span) == context_of(created).span_id
        assert span.status.description == "too hot"
        about = attributes_of(span)
        assert about["messaging.operation.type"] == "settle"
        assert about["messaging.system"] == "scripted"
    attempts = [attributes_of(s)["pillarbox.attempts"] for s in (*retries, given_up)]
    assert attempts == [1, 2, 3]


async def test_a_failing_exporter_does_not_stop_the_relay_and_is_logged(
    database_url: str, spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(message: Message) -> Confirmation:
        return Nacked("no", permanent=True) if message.topic == "bad" else Acked()

    publisher = ScriptedPublisher(answer)
    messages = [Message("bad", b""), Message("good", b"")]
    await asyncio.to_thread(insert, database_url, *messages)
    spans.provider.add_span_processor(Broken())
    async with running(database_url, publisher) as relay:
        await relay.events.wait_for(MessageDeadLettered)
        await publisher.until_acked(1)
    assert publisher.topics() == ["good"]
    assert "TracingFailed" in caplog.text
    assert "RuntimeError: raised in Broken.on_start" in caplog.text
