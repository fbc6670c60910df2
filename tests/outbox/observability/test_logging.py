"""Events as log records: repeated events about one key are summarized."""

import logging
import sys
from datetime import timedelta

import pytest
from opentelemetry.trace import NonRecordingSpan, SpanContext, use_span

from pillarbox import uuid7
from pillarbox.inbox.events import HandlerFailed
from pillarbox.outbox.events import Event, ProcessMeasured
from pillarbox.outbox.logs.event_record import trace_id_of
from pillarbox.outbox.observability.logging import LogEvents, TraceContext
from pillarbox.relay.events import (
    BrokerLost,
    BrokerRecovered,
    LeaseTaken,
    MessageRefused,
)

MINUTE = timedelta(minutes=1)


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock, caplog: pytest.LogCaptureFixture) -> LogEvents:
    caplog.set_level("INFO", "pillarbox")
    return LogEvents(repeats=MINUTE, clock=clock)


def blocked(topic: str, attempts: int, reason: str = "no") -> MessageRefused:
    return MessageRefused(
        id=uuid7(), topic=topic, key="k", attempts=attempts, reason=reason
    )


def lost() -> BrokerLost:
    return BrokerLost(reason="refused", seconds=1.0)


def delayed(topic: str) -> MessageRefused:
    return MessageRefused(id=uuid7(), topic=topic, key=None, attempts=1, reason="no")


def anything() -> Event:
    return LeaseTaken(lanes=(1,))


def about(caplog: pytest.LogCaptureFixture, what: str) -> list[str]:
    return [m for m in caplog.messages if what in m]


def test_the_first_event_is_logged_at_once_and_repetitions_as_one_line_with_a_count(
    log: LogEvents, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for attempts in range(1, 6):
        log(blocked("a", attempts))
    log(blocked("b", 1))
    assert len(about(caplog, "topic=a")) == len(about(caplog, "topic=b")) == 1
    log(blocked("c", 1, "no such topic"))
    log(blocked("c", 2, "too large"))
    assert len(about(caplog, "topic=c")) == 2, "the reasons differ"

    clock.now += 61
    log(anything())
    _, summary = about(caplog, "topic=a")
    assert "attempts=5" in summary
    assert summary.endswith("repeated=4")
    assert len(about(caplog, "topic=b")) == 1


def test_only_a_lasting_outage_is_a_warning_with_a_remedy(
    log: LogEvents, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for event in (lost(), lost(), BrokerRecovered(), lost()):
        log(event)
        clock.now += 20
    log(BrokerRecovered())
    assert {it.levelname for it in caplog.records} == {"INFO"}
    assert len(about(caplog, "BrokerLost")) == 3
    assert "remedy" not in caplog.text

    caplog.set_level("WARNING", "pillarbox")
    caplog.clear()
    for _ in range(4):
        log(lost())
        clock.now += 31
    (summary,) = caplog.records
    assert summary.levelname == "WARNING"
    assert "remedy='check that the broker is running" in summary.getMessage()
    assert summary.__dict__["values"]["repeated"] >= 1


def test_fields_excluded_from_logs_are_not_logged(
    log: LogEvents, caplog: pytest.LogCaptureFixture
) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    event = MessageRefused(
        id=uuid7(),
        topic="t",
        key=None,
        attempts=1,
        reason="no",
        traceparent=f"00-{trace_id}-00f067aa0ba902b7-01",
    )
    log(event)
    (record,) = caplog.records
    assert "traceparent" not in record.getMessage() + str(record.__dict__["values"])
    assert record.__dict__["trace_id"] == trace_id


def test_a_header_that_is_not_a_trace_context_has_no_trace_id() -> None:
    for header in (None, "", "nonsense", "00-" + "0" * 32 + "-00f067aa0ba902b7-01"):
        assert trace_id_of(header) is None


def test_a_record_has_the_ids_of_the_current_span_or_keeps_the_trace_of_its_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = SpanContext(trace_id=0xABC, span_id=0xDEF, is_remote=False)
    record = logging.makeLogRecord({"trace_id": "of the event"})
    assert TraceContext().filter(record)
    assert record.__dict__["trace_id"] == "of the event"
    assert "span_id" not in record.__dict__
    with use_span(NonRecordingSpan(context)):
        assert TraceContext().filter(record)
    assert record.__dict__["trace_id"] == f"{0xABC:032x}"
    assert record.__dict__["span_id"] == f"{0xDEF:016x}"

    monkeypatch.delitem(sys.modules, "opentelemetry.trace", raising=False)
    record = logging.makeLogRecord({})
    assert TraceContext().filter(record)
    assert "trace_id" not in record.__dict__, "without OpenTelemetry"


def test_ongoing_events_are_summarized_and_logged_anew_after_a_pause(
    log: LogEvents, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        log(delayed("orders"))
        log(delayed("orders"))
        clock.now += 61
    log(anything())
    lines = about(caplog, "topic=orders")
    assert [line.partition("repeated=")[2] for line in lines] == ["", "1", "2", "2"]

    clock.now += 61
    log(anything())
    log(delayed("orders"))
    assert "repeated" not in about(caplog, "topic=orders")[-1]


def test_collected_events_are_reported_when_the_observer_ends(
    log: LogEvents, caplog: pytest.LogCaptureFixture
) -> None:
    observer = LogEvents(repeats=MINUTE)
    for event in (blocked("c", 1), blocked("c", 2), lost(), lost()):
        observer(event)
    del observer
    assert about(caplog, "topic=c")[-1].endswith("repeated=1")
    assert caplog.records[-1].levelname == "INFO", "the outage hasn't lasted"


def test_memory_stays_bounded_with_a_flood_of_keys(
    log: LogEvents, caplog: pytest.LogCaptureFixture
) -> None:
    log(blocked("first", 1))
    log(blocked("first", 2))
    for number in range(10_000):
        log(blocked(f"k{number}", 1))
    assert about(caplog, "topic=first")[-1].endswith("repeated=1")


def test_a_stack_trace_is_printed_on_separate_lines_and_escaped(
    log: LogEvents, caplog: pytest.LogCaptureFixture
) -> None:
    about = {"consumer": "billing", "id": uuid7(), "topic": "t", "key": None}
    trace = "Traceback:\n  File\n    raise\nValueError: \x1b[2J\n"
    for attempts, stacktrace in ((1, trace), (2, None)):
        log(
            HandlerFailed(
                **about,  # type: ignore[arg-type]
                attempts=attempts,
                reason=f"ValueError {attempts}",
                seconds_until_retry=1.0,
                stacktrace=stacktrace,
            )
        )

    first, second = caplog.records
    head, *lines = first.getMessage().splitlines()
    assert "stacktrace" not in head
    assert lines == ["Traceback:", "  File", "    raise", r"ValueError: \x1b[2J"]
    assert first.__dict__["values"]["stacktrace"] == trace
    assert len(second.getMessage().splitlines()) == 1
    assert "attempts=2" in second.getMessage()


def test_a_duration_is_logged_in_the_format_that_users_type(
    log: LogEvents, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "pillarbox")
    log(
        ProcessMeasured(
            kind="consumer",
            name="billing",
            in_flight=0,
            held=0,
            blocked_keys=1,
            blocked_for=timedelta(days=2),
        )
    )
    assert " blocked_for=2d " in caplog.text
