"""The text of an application's error is in the dead letter, and nowhere else.

It may quote anything: a payload, a row, the answer of another service.
"""

import enum
import errno
import json
import logging
from collections.abc import Callable, Sequence
from datetime import date, timedelta
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from sqlalchemy.ext.asyncio import AsyncSession

import pillarbox.outbox.cli.main
from examples.sealed.aes_gcm import AesGcm
from pillarbox import AsyncJob, Consumer, DeadLetter, Message, RetryLater
from pillarbox.inbox.dead_letters.retry import HandlerRetrier
from pillarbox.inbox.events import (
    FinishedJobFailed,
    MessageDeadLettered,
    RetryRequested,
)
from pillarbox.inbox.processing import processing
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.inbox.webhook.events import WebhookFailed
from pillarbox.outbox import tracing
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.dead_letters.events import DeadLetterFailed
from pillarbox.outbox.dead_letters.retry import Candidate, Outcome
from pillarbox.outbox.observability.logging import LogEvents
from pillarbox.outbox.observability.opentelemetry import instrument
from pillarbox.outbox.payload.payload_codec import encoded
from pillarbox.outbox.testing.events import RecordedEvents
from tests.fixtures.consumers import QUICK, async_sessions_of, running
from tests.fixtures.sessions import execute
from tests.fixtures.spans import Spans
from tests.fixtures.webhook import hook_app, post, request_of, served

SECRET = "jane@example.org"
LONG: Any = {"lease": timedelta(seconds=30)}
Status = enum.Enum("Status", ["PAID"])


class OddError(Exception):
    def __init__(self) -> None:
        super().__init__("it is odd", {"whom": SECRET})


def quoting() -> None:
    try:
        Status(SECRET)
    except ValueError as error:
        raise RuntimeError(json.dumps({"why": str(error)})) from None


def grouped() -> None:
    raise ExceptionGroup(f"two of {SECRET}", [ValueError(SECRET), KeyError(SECRET)])


def noted() -> None:
    error = OddError()
    error.add_note(SECRET)
    raise error


def decided() -> None:
    try:
        int(SECRET)
    except ValueError as error:
        raise DeadLetter(f"no total: {error}") from error


def exiting() -> None:
    raise SystemExit(f"bye, {SECRET}")


def refusing() -> None:
    raise OSError(errno.EINVAL, f"refused {SECRET}")


def missing() -> None:
    open(f"/none/{SECRET}").close()  # noqa: PTH123


WAYS: dict[str, Callable[[], object]] = {
    "enum": lambda: Status(SECRET),
    "key": lambda: dict[str, str]()[SECRET],
    "date": lambda: date.fromisoformat(SECRET),
    **{it.__name__: it for it in (quoting, grouped, noted, decided, exiting)},
    **{it.__name__: it for it in (refusing, missing)},
}


KINDS = ("one", "many", "job")


def consumer_of(sessions: Any, **settings: Any) -> Consumer:
    """Return a consumer whose handlers of each kind fail in each way."""
    messages = [Message(f"{kind}.{way}", {}) for kind in KINDS for way in WAYS]
    if (codec := settings.get("codec")) is not None:
        messages = [encoded(message, codec) for message in messages]
    settings = {"name": "c", "retry": QUICK, **settings}
    consumer = Consumer(MemorySource(*messages), sessions, **settings)
    consumer.observe(LogEvents())

    @consumer.handles("one.*")
    async def one(session: AsyncSession, message: Message) -> None:
        WAYS[message.topic.removeprefix("one.")]()

    @consumer.handles_batch("many.*", max_size=2)
    async def many(session: AsyncSession, messages: Sequence[Message]) -> None:
        WAYS[messages[0].topic.removeprefix("many.")]()

    @consumer.job("job.*", **LONG)
    async def job(job: AsyncJob, message: Message) -> None:
        WAYS[message.topic.removeprefix("job.")]()

    return consumer


def told(url: str, events: RecordedEvents, spans: Spans, log: str) -> str:
    """Return what was said outside of the columns that are read like payloads."""
    rows = execute(
        url,
        "SELECT error_reason FROM inbox.dead_letter UNION ALL"
        " SELECT reason FROM inbox.job UNION ALL SELECT reason FROM inbox.process",
    )
    traces = [span.to_json() for span in spans.all()]
    return f"{rows}{events.events}{traces}{log}"


def traces_in(url: str) -> dict[str, tuple[str, str]]:
    """Return the reasons and the stack traces of dead letters, by topic."""
    rows = execute(
        url, "SELECT topic, error_reason, error_stacktrace FROM inbox.dead_letter"
    )
    return {topic: (reason, trace or "") for topic, reason, trace in rows}


async def test_only_the_stack_trace_of_a_dead_letter_has_the_text(
    database_url: str, spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with (
        async_sessions_of(database_url) as sessions,
        running(consumer_of(sessions)) as events,
    ):
        await events.wait_for(MessageDeadLettered, len(KINDS) * len(WAYS))

    said = told(database_url, events, spans, caplog.text)
    assert "Traceback (most recent call last)" in said
    assert SECRET not in said
    for topic, (reason, trace) in traces_in(database_url).items():
        of_system = topic.endswith(("missing", "refusing"))
        assert of_system or "(test_errors_told.py, line " in reason, topic
        assert SECRET in trace, topic


async def test_a_codec_hides_the_text_and_redact_lets_it_out(
    database_url: str, spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    settings: list[dict[str, Any]] = [
        {"name": "a", "codec": AesGcm({"here": AESGCM.generate_key(256)})},
        {"name": "b", "redact": lambda text: text.replace("org", "…")},
    ]
    reasons, traces = [], []
    async with async_sessions_of(database_url) as sessions:
        for each in settings:
            async with running(consumer_of(sessions, **each)) as events:
                await events.wait_for(MessageDeadLettered, len(KINDS) * len(WAYS))
            reasons.append(told(database_url, events, spans, caplog.text))
            traces.append(repr(traces_in(database_url)))
            execute(database_url, "TRUNCATE inbox.dead_letter, inbox.job")

    assert SECRET not in reasons[0] + traces[0]
    assert "jane@example.…" in reasons[1]
    assert "jane@example.…" in traces[1]
    assert SECRET not in reasons[1] + traces[1]


async def test_decisions_upcasters_and_errors_after_the_end_tell_no_text(
    database_url: str, spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    asked: list[object] = []
    messages = [Message(topic, {}) for topic in ("later", "late", "permanent", "old")]
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(MemorySource(*messages), sessions, name="c", retry=QUICK)
        consumer.observe(LogEvents())

        @consumer.handles("later")
        async def later(session: AsyncSession, message: Message) -> None:
            try:
                Status(SECRET)
            except ValueError as error:
                if asked:
                    return
                asked.append(error)
                raise RetryLater(
                    timedelta(milliseconds=1), f"not yet: {error}"
                ) from None

        @consumer.job("late", **LONG)
        async def late(job: AsyncJob, message: Message) -> None:
            async with job.finish():
                pass
            Status(SECRET)

        @consumer.handles("permanent", permanent=ValueError)
        async def permanent(session: AsyncSession, message: Message) -> None:
            Status(SECRET)

        @consumer.handles("old", version=2)
        async def old(session: AsyncSession, message: Message) -> None: ...

        @consumer.upcasts("old", to=2)
        def upcast(message: Message) -> object:
            return Status(SECRET)

        async with running(consumer) as events:
            await events.wait_for(MessageDeadLettered, 2)
            await events.wait_for(FinishedJobFailed)
            (postponed,) = await events.wait_for(RetryRequested)

    assert "raised in " in postponed.reason
    assert SECRET not in told(database_url, events, spans, caplog.text)
    for topic, (reason, trace) in traces_in(database_url).items():
        assert "raised in " in reason, topic
        assert SECRET in trace, topic


async def test_webhooks_and_retries_of_dead_letters_tell_no_text(
    database_url: str, spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    events = RecordedEvents()

    async def fail(session: AsyncSession, message: Message) -> None:
        WAYS[message.topic]()

    codec = AesGcm({"here": AESGCM.generate_key(256)})
    async with async_sessions_of(database_url) as sessions:
        app = hook_app(dict.fromkeys(WAYS, fail), sessions, events, LogEvents())
        async with served(app) as url:
            for way in WAYS:
                plain = Message(way, b"1", content_type="text/plain")
                sealed = encoded(plain, codec)
                answer = await post(url, request_of(sealed), sealed.payload)
                assert SECRET not in str(answer)
                # Nothing is in clear beside a payload that is encoded.
                assert SECRET not in repr(traces_in(database_url))
            assert not traces_in(database_url)
            for way in WAYS:
                message = Message(way, b"1", content_type="text/plain")
                answer = await post(url, request_of(message), message.payload)
                assert SECRET not in str(answer)
        assert set(traces_in(database_url)) == {"decided"}
        execute(database_url, "TRUNCATE inbox.dead_letter")
        consumer = consumer_of(sessions)
        async with running(consumer) as dead:
            await dead.wait_for(MessageDeadLettered, len(KINDS) * len(WAYS))
        retrier = HandlerRetrier(
            sessions, consumer._routes, consumer._writer, notify=events
        )
        found = execute(
            database_url,
            "SELECT id, created_at FROM inbox.dead_letter WHERE origin = 'consumer:c'",
        )
        async with retrier:
            for row in found:
                assert await retrier.retry(Candidate(*row)) is Outcome.FAILED

    for event in events.events:
        LogEvents()(event)
    assert {type(event) for event in events.events} >= {WebhookFailed, DeadLetterFailed}
    assert SECRET not in told(database_url, events, spans, caplog.text)
    for topic, (_, trace) in traces_in(database_url).items():
        assert SECRET in trace, topic


def test_tracing_and_the_command_line_tell_no_text(
    spans: Spans,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    instrument(attributes=lambda _: WAYS["enum"]())  # type: ignore[arg-type,return-value]
    with processing(tracing.tracer, [Message("t", b"")], "c"):
        pass
    monkeypatch.setattr(pillarbox.outbox.cli.main, "_run", lambda _: WAYS["key"]())
    assert main(["status"]) == 1

    assert "TracingFailed" in caplog.text
    told = capsys.readouterr().err
    assert "KeyError: raised in " in told
    assert SECRET not in caplog.text + told
