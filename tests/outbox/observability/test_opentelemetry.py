"""Added messages get spans, and tracing costs nothing unless it is enabled."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import SpanKind, TraceFlags
from redis import Redis
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from pillarbox import Message, add, uuid7
from pillarbox.outbox import testing
from pillarbox.outbox.logs.event_record import trace_id_of
from pillarbox.outbox.observability.opentelemetry import uninstrument
from pillarbox.outbox.payload.payload_codec import PayloadCodec
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from pillarbox.outbox.testing.samples import TRACEPARENT
from pillarbox.outbox.tracing import system_of
from pillarbox.relay.publishers.memory import MemoryPublisher
from tests.fixtures.processes import RunningProcess, command_line
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute
from tests.fixtures.spans import (
    Broken,
    Record,
    Spans,
    attributes_of,
    parent_of,
    traceparent_of,
)
from tests.fixtures.waiting import wait_for

ROOT = Path(__file__).parents[3]
ONE = Message("orders.placed", {"secret": 1}, key="a key", tenant="a tenant")
IMPORTS = """
import sys
import pillarbox.inbox.cli.consume, pillarbox.inbox.webhook
import pillarbox.outbox.cli.main, pillarbox.relay.cli
import pillarbox.outbox.observability.logging, pillarbox.outbox.observability.prometheus
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
CONSOLE = {
    "OTEL_TRACES_EXPORTER": "console",
    "OTEL_METRICS_EXPORTER": "none",
    "OTEL_LOGS_EXPORTER": "none",
}
ADD = """
from opentelemetry import trace
from pillarbox import Message, insert_statement

with trace.get_tracer("application").start_as_current_span("request"):
    insert_statement(Message("orders.placed", 1))
"""


class Reversing:
    """A codec that makes payloads in the table unreadable."""

    name = "reversing"

    def encode(self, message: Message) -> tuple[str, bytes]:
        return "1", message.payload[::-1]

    def decode(self, message: Message, key_id: str) -> bytes:
        return message.payload[::-1]


def stored(url: str) -> list[dict[str, str]]:
    rows = execute(url, "SELECT headers FROM outbox.message ORDER BY seq")
    return [headers for (headers,) in rows]


def added(*messages: Message, codec: PayloadCodec | None = None) -> list[Message]:
    """Add messages to a session without a database; return those pending in it."""
    with Session(create_engine("postgresql+psycopg://")) as session:
        add(session, *messages, codec=codec)
        pending = testing.added(session)
        session.rollback()
        return pending


def test_each_message_added_has_a_span_in_the_callers_trace_and_carries_its_context(
    spans: Spans, database_url: str
) -> None:
    engine = create_engine(sqlalchemy_url(database_url))
    other = Message("orders.billed", 2)
    with (
        spans.tracer.start_as_current_span("request") as request,
        Session(engine) as session,
        session.begin(),
    ):
        add(session, ONE, other)
    engine.dispose()
    insert(database_url, Message("by a statement", 3))

    made = [spans.one("create orders.placed"), spans.one("create orders.billed")]
    assert [span.kind for span in made] == [SpanKind.PRODUCER] * 2
    assert {parent_of(span) for span in made} == {request.get_span_context().span_id}
    made.append(spans.one("create by a statement"))
    assert stored(database_url) == [{"traceparent": traceparent_of(s)} for s in made]
    assert attributes_of(made[0]) == {
        "messaging.system": "pillarbox",
        "messaging.operation.name": "create",
        "messaging.operation.type": "create",
        "messaging.destination.name": "orders.placed",
        "messaging.message.id": str(ONE.id),
    }


def test_a_context_that_the_caller_set_is_kept_and_has_no_span(spans: Spans) -> None:
    carried = {"traceparent": TRACEPARENT, "tracestate": "a=1"}
    with spans.tracer.start_as_current_span("request"):
        (message,) = added(ONE.replace(headers=carried))
    assert message.headers == carried
    assert spans.starting("create") == []


def test_the_tracestate_of_the_caller_is_propagated(spans: Spans) -> None:
    from opentelemetry import trace

    upstream = trace.SpanContext(
        1, 2, True, trace.TraceFlags(1), trace.TraceState([("vendor", "a:b")])
    )
    around = trace.set_span_in_context(trace.NonRecordingSpan(upstream))
    with spans.tracer.start_as_current_span("request", around):
        (message,) = added(ONE)
    assert message.headers["tracestate"] == "vendor=a:b"
    assert trace_id_of(message.headers["traceparent"]) == f"{1:032x}"


def test_an_unsampled_message_carries_the_unsampled_flag(record: Record) -> None:
    spans = record(sampler=ParentBased(ALWAYS_OFF))
    (message,) = added(ONE)
    flags = int(message.headers["traceparent"][-2:], 16)
    assert not flags & TraceFlags.SAMPLED
    assert spans.all() == ()


def test_an_encoded_message_has_its_context_in_plain_text(spans: Spans) -> None:
    (message,) = added(ONE, codec=Reversing())
    assert message.payload == ONE.payload[::-1]
    span = spans.one("create orders.placed")
    assert message.headers["traceparent"] == traceparent_of(span)


def test_spans_show_conversation_cause_and_chosen_attributes_but_no_content(
    record: Record,
) -> None:
    spans = record(attributes=lambda message: {"shop.tenant": message.tenant or ""})
    headers = {"correlation-id": "basket 7", "causation-id": str(ONE.id)}
    added(Message("orders.billed", 1, tenant="acme", headers=headers), ONE)
    about = attributes_of(spans.one("create orders.billed"))
    assert about["messaging.message.conversation_id"] == "basket 7"
    assert about["pillarbox.causation_id"] == str(ONE.id)
    assert about["shop.tenant"] == "acme"
    span = spans.one("create orders.placed")
    chosen = {"shop.tenant": "a tenant"}
    shown = {it: value for it, value in attributes_of(span).items() if it not in chosen}
    text = f"{span.name} {shown} {span.events} {span.status}"
    for hidden in ("secret", "a key", "a tenant"):
        assert hidden not in text


def test_a_failing_exporter_does_not_fail_messages_and_is_reported_once(
    spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    spans.provider.add_span_processor(Broken())
    with caplog.at_level(logging.WARNING, "pillarbox"):
        assert added(ONE, ONE) == [ONE, ONE]
        assert added(ONE) == [ONE]
    (record,) = caplog.records
    assert record.__dict__["event"] == "TracingFailed"
    assert "raised in Broken.on_start" in record.__dict__["values"]["reason"]
    assert "span processors" in record.__dict__["values"]["remedy"]


def test_a_failing_attributes_function_does_not_fail_messages(
    record: Record, caplog: pytest.LogCaptureFixture
) -> None:
    record(attributes=lambda message: {"order": message.json()["order"]})
    assert added(ONE) == [ONE]
    assert "KeyError" in caplog.text


def test_nothing_is_traced_after_uninstrument(spans: Spans) -> None:
    uninstrument()
    assert added(ONE) == [ONE]
    assert spans.all() == ()


def test_opentelemetry_instrument_needs_no_change_to_the_code() -> None:
    script = Path(sys.executable).with_name("opentelemetry-instrument")
    said = subprocess.run(
        [script, sys.executable, "-c", ADD],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | CONSOLE,
        cwd=ROOT,
    ).stdout
    assert '"name": "create orders.placed"' in said
    assert '"name": "request"' in said


def test_opentelemetry_instrument_traces_a_relay(
    database_url: str, redis_url: str, tmp_path: Path
) -> None:
    insert(database_url, ONE, ONE.replace(id=uuid7(), topic="orders.unknown", key="b"))
    with Redis.from_url(redis_url) as client:
        client.mset({"orders.placed": "no stream", "orders.unknown": "no stream"})
    relay = RunningProcess(
        [
            str(Path(sys.executable).with_name("opentelemetry-instrument")),
            *command_line("pillarbox", "relay", "--database", database_url),
            *("--broker", redis_url, "--max-attempts", "2"),
        ],
        tmp_path / "log",
        CONSOLE,
    )
    try:
        settled = "SELECT count(dead_lettered_at) FROM outbox.message_status"
        wait_for("both", lambda: execute(database_url, settled) == [(2,)], seconds=90)
    finally:
        relay.terminate()
        assert relay.wait() == 0, relay.log()
    log = relay.log()
    for topic in ("orders.placed", "orders.unknown"):
        assert log.count(f'"name": "retry {topic}"') == 1
        # Only once, although several observers listen to the event.
        assert log.count(f'"name": "dead_letter {topic}"') == 1
    assert '"messaging.system": "redis"' in log


def test_no_process_imports_opentelemetry_on_its_own() -> None:
    said = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout
    assert said == "[]\n"


def test_a_third_party_adapter_is_named_after_its_class() -> None:
    class AcmePublisher:
        pass

    class Source:
        messaging_system = "activemq"

    assert system_of(AcmePublisher()) == "acme"
    assert system_of(Source()) == "activemq"
    assert system_of(MemoryPublisher()) == "memory"
