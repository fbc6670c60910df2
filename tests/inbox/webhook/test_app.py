"""The webhook endpoint answers once receipt and effects are committed."""

import asyncio
import sys
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session
from starlette.applications import Starlette
from starlette.routing import Mount

from pillarbox import DeadLetter, Message, RetryLater
from pillarbox.inbox.events import DuplicateSkipped, MessageDeadLettered, MessageHandled
from pillarbox.inbox.handlers.signature import is_async
from pillarbox.inbox.webhook import WebhookFailed
from pillarbox.outbox.retry import RetryPolicy
from pillarbox.outbox.testing.events import RecordedEvents
from pillarbox.outbox.testing.postgres import PostgresServer
from pillarbox.relay.publisher import Acked
from pillarbox.relay.publishers.http import HttpPublisher
from tests.fixtures.consumers import (
    async_sessions_of,
    numbered,
    sessions_by,
)
from tests.fixtures.effects import effects, note, receipts
from tests.fixtures.http import SECRET, SECRET_ENV
from tests.fixtures.relay import insert, running
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for
from tests.fixtures.webhook import (
    ONE,
    OPTIONS,
    hook_app,
    post,
    request_of,
    served,
    status_of,
)
from tests.inbox.test_idle_transactions import wait_until_none_is_idle


async def test_a_posted_message_is_handled_once(
    inbox_url: str,
    inbox_sessions: async_sessionmaker[AsyncSession],
    events: RecordedEvents,
) -> None:
    app = hook_app(note, inbox_sessions, events)
    batch = numbered(50, keys=5)
    async with (
        served(app) as hook,
        HttpPublisher.from_url(f"{hook}/{OPTIONS}") as publisher,
    ):
        assert await publisher.publish(batch) == [Acked()] * 50
        assert await publisher.publish(batch) == [Acked()] * 50
    assert effects(inbox_url) == sorted(map(str, range(50)))
    assert len(events.of(MessageHandled)) == 50
    assert len(events.of(DuplicateSkipped)) == 50


async def test_concurrent_requests_with_one_message_handle_it_once(
    inbox_url: str, inbox_sessions: async_sessionmaker[AsyncSession]
) -> None:
    app = hook_app(note, inbox_sessions)
    async with served(app) as hook:
        statuses = await asyncio.gather(*(status_of(hook, ONE) for _ in range(5)))
    assert statuses == [204] * 5
    assert effects(inbox_url) == ["1"]


async def test_an_application_without_an_inbox_does_not_start(
    empty_database_url: str,
) -> None:
    said: list[dict[str, Any]] = []
    events = iter(["lifespan.startup", "lifespan.shutdown"])

    async def receive() -> dict[str, str]:
        return {"type": next(events)}

    async def send(event: dict[str, Any]) -> None:
        said.append(event)

    async with async_sessions_of(empty_database_url, "asyncpg") as sessions:
        await hook_app(note, sessions)({"type": "lifespan"}, receive, send)
    (answer,) = said
    assert answer["type"] == "lifespan.startup.failed"
    assert "can't read the inbox in the database" in answer["message"]


async def test_a_handler_that_is_idle_for_max_idle_is_ended_by_the_server(
    inbox_url: str, inbox_sessions: async_sessionmaker[AsyncSession]
) -> None:
    ended: list[Message] = []

    async def idle(session: AsyncSession, message: Message) -> None:
        await note(session, message)
        await wait_until_none_is_idle(inbox_url)
        ended.append(message)

    app = hook_app(idle, inbox_sessions, max_idle=timedelta(seconds=1))
    async with served(app) as hook:
        assert await status_of(hook, ONE) == 500
    assert len(ended) == 1
    assert effects(inbox_url) == []
    assert receipts(inbox_url) == 0


async def test_a_failed_commit_is_not_a_success(
    inbox_url: str,
    inbox_sessions: async_sessionmaker[AsyncSession],
    events: RecordedEvents,
) -> None:
    execute(inbox_url, "INSERT INTO effect VALUES ('1')")
    app = hook_app(note, inbox_sessions, events)
    async with served(app) as hook:
        status, said, _ = await post(hook, request_of(ONE), ONE.payload)
        assert status == 500
        assert "duplicate key" not in said
        (failed,) = events.of(WebhookFailed)
        assert "duplicate key" in failed.reason
        execute(inbox_url, "DELETE FROM effect")
        assert await status_of(hook, ONE) == 204
    assert effects(inbox_url) == ["1"]


def exits(session: Session, message: Message) -> None:
    sys.exit(0)


async def exits_in_a_task(session: AsyncSession, message: Message) -> None:
    sys.exit(0)


def stops(session: Session, message: Message) -> None:
    raise StopIteration


def generates(session: Session, message: Message) -> Any:
    return (n for n in range(1))


async def leaves_its_work(session: AsyncSession, message: Message) -> Any:
    return note(session, message)


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (exits, "the handler raised SystemExit"),
        (exits_in_a_task, "the handler raised SystemExit"),
        (stops, "the handler raised StopIteration"),
        (generates, "returned a generator that nobody would run"),
        (leaves_its_work, "returned a coroutine that nobody would run"),
    ],
)
async def test_a_handler_that_exits_or_leaves_its_work_is_answered_with_500(
    handler: Any, reason: str, inbox_url: str, events: RecordedEvents
) -> None:
    driver = "asyncpg" if is_async(handler) else "psycopg"
    async with (
        sessions_by(inbox_url, driver) as sessions,
        served(hook_app({"orders.*": handler}, sessions, events)) as hook,
    ):
        assert await status_of(hook, ONE) == 500
    (failed,) = events.of(WebhookFailed)
    assert reason in failed.reason
    assert (effects(inbox_url), receipts(inbox_url)) == ([], 0)


async def test_a_stack_trace_is_reported_once_and_redacted(
    inbox_url: str,
    inbox_sessions: async_sessionmaker[AsyncSession],
    events: RecordedEvents,
) -> None:
    calls = 0

    async def handle(session: AsyncSession, message: Message) -> None:
        nonlocal calls
        calls += 1
        error = ValueError("token=secret")
        if calls < 3:
            raise error
        raise DeadLetter("no such token=secret") from error

    app = hook_app(
        handle,
        inbox_sessions,
        events,
        redact=lambda said: said.replace("secret", "…"),
    )
    async with served(app) as hook:
        statuses = [await status_of(hook, ONE) for _ in range(3)]
    assert statuses == [500, 500, 204]
    first, second = events.of(WebhookFailed)
    assert first.reason == second.reason == "ValueError: token=…"
    assert first.stacktrace is not None
    assert first.stacktrace.startswith("Traceback")
    assert second.stacktrace is None
    ((reason, stacktrace),) = execute(
        inbox_url, "SELECT error_reason, error_stacktrace FROM inbox.dead_letter"
    )
    assert reason == "DeadLetter: no such token=…"
    for trace in (first.stacktrace, stacktrace):
        assert "ValueError: token=…" in trace
        assert "token=secret" not in trace


async def test_the_error_that_a_handler_raises_decides_the_outcome(
    inbox_url: str,
    inbox_sessions: async_sessionmaker[AsyncSession],
    events: RecordedEvents,
) -> None:
    async def later(session: AsyncSession, message: Message) -> None:
        raise RetryLater(timedelta(seconds=7))

    async def never(session: AsyncSession, message: Message) -> None:
        raise DeadLetter("no such shop")

    handlers = {"later": later, "never.*": never}
    app = hook_app(handlers, inbox_sessions, events)
    put_off, given_up = Message("later", b""), Message("never.again", b"\xff")
    async with served(app) as hook:
        status, _, headers = await post(hook, request_of(put_off), b"")
        assert (status, headers.get("retry-after")) == (425, "7")
        assert await status_of(hook, given_up) == 204
    (letter,) = execute(
        inbox_url, "SELECT origin, topic, payload, error_reason FROM inbox.dead_letter"
    )
    assert letter[:3] == ("consumer:billing", "never.again", b"\xff")
    assert "no such shop" in letter[3]
    assert len(events.of(MessageDeadLettered)) == 1


async def test_a_handler_can_raise_retry_later_any_number_of_times(
    inbox_url: str, inbox_sessions: async_sessionmaker[AsyncSession]
) -> None:
    seen: list[str] = []

    async def handle(session: AsyncSession, message: Message) -> None:
        seen.append(message.topic)
        if len(seen) <= 3:
            raise RetryLater(timedelta(milliseconds=1))
        await note(session, message)

    app = hook_app(handle, inbox_sessions)
    once = RetryPolicy(max_attempts=1)
    insert(inbox_url, Message("first", b"1", key="a"), Message("second", b"2", key="a"))
    async with served(app) as hook:
        publisher = HttpPublisher.from_url(f"{hook}/{OPTIONS}")
        async with running(inbox_url, publisher, retry=once):
            await asyncio.to_thread(
                wait_for, "both have happened", lambda: effects(inbox_url) == ["1", "2"]
            )
    assert seen == ["first"] * 4 + ["second"]
    assert execute(inbox_url, "SELECT count(*) FROM outbox.dead_letter") == [(0,)]


async def test_a_payload_that_contradicts_its_content_type_is_dead_lettered_unchanged(
    inbox_url: str, inbox_sessions: async_sessionmaker[AsyncSession]
) -> None:
    app = hook_app(note, inbox_sessions)
    wrong = Message("orders", b"{\xff", content_type="application/json")
    async with served(app) as hook:
        assert [await status_of(hook, m) for m in (wrong, ONE)] == [204, 204]
    query = "SELECT message_id, payload FROM inbox.dead_letter"
    assert execute(inbox_url, query) == [(str(wrong.id), wrong.payload)]
    assert effects(inbox_url) == ["1"]


async def test_the_endpoint_can_be_mounted(
    inbox_url: str, inbox_sessions: async_sessionmaker[AsyncSession]
) -> None:
    app = hook_app(note, inbox_sessions)
    async with (
        served(Starlette(routes=[Mount("/hooks", app)])) as hook,
        HttpPublisher.from_url(f"{hook}/hooks/in{OPTIONS}") as publisher,
    ):
        assert await publisher.publish([ONE, ONE]) == [Acked()] * 2
        assert (await post(hook, request_of(ONE), b"1"))[0] == 404
    assert effects(inbox_url) == ["1"]


async def test_the_number_of_running_handlers_is_bounded(
    inbox_url: str, inbox_sessions: async_sessionmaker[AsyncSession]
) -> None:
    at_work = most = 0
    pair = asyncio.Barrier(2)

    async def handle(session: AsyncSession, message: Message) -> None:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        await pair.wait()
        await note(session, message)
        at_work -= 1

    app = hook_app(handle, inbox_sessions, max_in_flight=2)
    async with served(app) as hook:
        statuses = await asyncio.gather(*(status_of(hook, m) for m in numbered(12)))
    assert statuses == [204] * 12
    assert most == 2


async def test_an_unavailable_database_is_reported_and_no_message_is_lost(
    migrated_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET_ENV, SECRET)
    execute(migrated_server.url, "CREATE TABLE effect (what text)")
    async with async_sessions_of(migrated_server.url) as sessions:
        app = hook_app(note, sessions)
        async with served(app) as hook:
            await asyncio.to_thread(migrated_server.stop, "immediate")
            assert await status_of(hook, ONE) == 503
            await asyncio.to_thread(migrated_server.start)
            assert await status_of(hook, ONE) == 204
    assert effects(migrated_server.url) == ["1"]
