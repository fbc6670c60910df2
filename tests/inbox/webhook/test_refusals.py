"""The webhook endpoint refuses invalid requests, and says why."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session

from pillarbox import Message
from pillarbox.inbox.webhook import WebhookApp, WebhookRefused
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.testing.events import RecordedEvents
from tests.fixtures.consumers import id_of
from tests.fixtures.effects import effects, note
from tests.fixtures.http import OTHER_SECRET, SECRET
from tests.fixtures.webhook import (
    ONE,
    hook_app,
    post,
    request_of,
    send_raw,
    served,
)


async def test_an_invalid_message_is_refused_permanently(
    inbox_url: str,
    inbox_sessions: async_sessionmaker[AsyncSession],
    events: RecordedEvents,
) -> None:
    app = hook_app(
        {"orders.placed": note},
        inbox_sessions,
        events,
        max_payload_bytes=100,
        rollout=timedelta(0),
    )
    good = request_of(ONE)
    old = Message("orders.placed", b"1", id=id_of(datetime(2020, 1, 1, tzinfo=UTC)))
    large = Message("orders.placed", bytes(101))
    other = Message("nobody.asked", b"1")
    cases: list[tuple[int, str, dict[str, str], bytes, str]] = [
        (401, "POST", {}, b"1", "missing header"),
        (
            401,
            "POST",
            request_of(ONE, secret=OTHER_SECRET),
            b"1",
            "no signature matches this body",
        ),
        (401, "POST", request_of(ONE, age=1000), b"1", "s old"),
        (401, "POST", good, b"2", "no signature matches this body"),
        (
            400,
            "POST",
            good | {"ce-id": str(other.id)},
            b"1",
            "ce-id differs from webhook-id",
        ),
        (400, "POST", good | {"ce-type": ""}, b"1", "there is no header ce-type"),
        (400, "POST", good | {"ce-schemaversion": "x"}, b"1", "isn't a whole number"),
        (400, "POST", request_of(old), b"1", "has a partition for its day"),
        (404, "POST", request_of(other), b"1", "no handler for topic 'nobody.asked'"),
        (405, "GET", good, b"", "use POST"),
        (413, "POST", request_of(large), large.payload, "limit of 100 bytes"),
        (415, "POST", good | {"content-encoding": "gzip"}, b"1", "not supported"),
    ]
    async with served(app) as hook:
        for expected, method, headers, body, reason in cases:
            status, said, _ = await post(hook, headers, body, method)
            assert (status, reason in said) == (expected, True), said
    assert effects(inbox_url) == []
    assert [event.status for event in events.of(WebhookRefused)] == [
        c[0] for c in cases
    ]


async def test_a_topic_without_a_handler_waits_for_a_replica_that_has_one(
    inbox_sessions: async_sessionmaker[AsyncSession],
) -> None:
    app = hook_app({"orders.placed": note}, inbox_sessions)
    async with served(app) as hook:
        other = request_of(Message("nobody.asked", b"1"))
        status, _, headers = await post(hook, other, b"1")
    assert (status, headers["retry-after"]) == (425, "1")


async def test_a_body_that_never_arrives_or_never_ends_is_refused(
    inbox_sessions: async_sessionmaker[AsyncSession],
) -> None:
    app = hook_app(
        note,
        inbox_sessions,
        max_payload_bytes=1000,
        read_timeout=timedelta(milliseconds=200),
    )
    head = b"POST / HTTP/1.1\r\nHost: h\r\n"
    chunk = b"200\r\n" + bytes(512) + b"\r\n"
    async with served(app) as hook:
        slow = await send_raw(hook, head + b"Content-Length: 10\r\n\r\nabc")
        assert slow.startswith(b"HTTP/1.1 408 ")
        chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
        assert (await send_raw(hook, chunked, chunk, chunk)).startswith(
            b"HTTP/1.1 413 "
        )
        told = head + b"Content-Length: 99999999999999999999999\r\n\r\n"
        assert (await send_raw(hook, told)).split()[1] in {b"400", b"413"}


async def test_a_duplicate_header_is_refused(
    inbox_url: str, inbox_sessions: async_sessionmaker[AsyncSession]
) -> None:
    app = hook_app(note, inbox_sessions)
    lines = [f"{n}: {v}" for n, v in request_of(ONE).items()]
    lines += ["Host: h", "Content-Length: 1", "CE-Type: another"]
    request = "\r\n".join(["POST / HTTP/1.1", *lines, "", "1"]).encode()
    async with served(app) as hook:
        assert (await send_raw(hook, request)).startswith(b"HTTP/1.1 400 ")
    assert effects(inbox_url) == []


async def test_an_invalid_endpoint_is_refused(
    inbox_sessions: async_sessionmaker[AsyncSession],
) -> None:
    def plain(session: Session, message: Message) -> None:
        raise AssertionError

    wrong: list[dict[str, Any]] = [
        {"secrets": []},
        {"secrets": ["hunter2"]},
        {"handlers": plain},
        {"handlers": {}},
        {"handlers": {"a*b": note}},
        {"max_in_flight": 0},
        {"max_in_flight": 10_000},  # more than the pool has connections
        {"max_idle": timedelta(0)},
        {"max_payload_bytes": 0},
        {"tolerance": timedelta(0)},
        {"read_timeout": timedelta(0)},
        {"sessions": None},
    ]
    right: dict[str, Any] = {
        "handlers": note,
        "sessions": inbox_sessions,
        "name": "billing",
        "secrets": [SECRET],
    }
    WebhookApp(**right)
    for change in wrong:
        with pytest.raises(ConfigError) as told:
            WebhookApp(**(right | change))
        assert "hunter2" not in str(told.value)
