"""Readiness follows a process's events; the HTTP server withstands bad clients."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
from aiohttp import web

from pillarbox.inbox.events import (
    ConsumerStarted,
    HandlerDatabaseLost,
    HandlerDatabaseRecovered,
    SourceLost,
    SourceRecovered,
)
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.observability import http_server
from pillarbox.outbox.observability.endpoints import listening
from pillarbox.outbox.observability.health import Health
from pillarbox.outbox.observability.http_server import Handler

STARTED = ConsumerStarted(consumer="billing", topics=())


@pytest.fixture
def health() -> Health:
    return Health(ConsumerStarted)


@pytest.fixture
async def port(health: Health, caplog: pytest.LogCaptureFixture) -> AsyncIterator[int]:
    async with served(health.handlers(), caplog) as port:
        yield port


@asynccontextmanager
async def served(
    handlers: Mapping[str, Handler], caplog: pytest.LogCaptureFixture
) -> AsyncIterator[int]:
    caplog.set_level("INFO", "pillarbox")
    async with listening("127.0.0.1:0", handlers):
        yield port_of(caplog)


def port_of(caplog: pytest.LogCaptureFixture) -> int:
    (port,) = re.findall(r"listening on \S*:(\d+)", caplog.text)
    return int(port)


@asynccontextmanager
async def connected(
    port: int,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(60):
            yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def answer_of(port: int, request: bytes) -> tuple[int, bytes]:
    """Send bytes, and read until the server closes the connection."""
    async with connected(port) as (reader, writer):
        writer.write(request)
        answer = await reader.read()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


async def get(
    port: int, path: str, method: str = "GET"
) -> tuple[int, dict[str, Any] | None]:
    request = f"{method} {path} HTTP/1.1\r\nHost: x\r\nUser-Agent: kubelet\r\n\r\n"
    status, body = await answer_of(port, request.encode())
    return status, json.loads(body) if body else None


def test_a_process_is_ready_from_its_start_to_its_end_unless_something_is_lost(
    health: Health,
) -> None:
    assert health.waits_for == ["start"]
    health(STARTED)
    assert health.waits_for == []
    lost: dict[str, Any] = {"consumer": "billing", "reason": "gone", "seconds": 1.0}
    health(SourceLost(queue="batch", **lost))
    health(SourceLost(queue="default", **lost))
    health(HandlerDatabaseLost(remedy="wait", **lost))
    assert health.waits_for == ["database", "source of batch", "source of default"]
    health(SourceRecovered(consumer="billing", queue="default"))
    health(HandlerDatabaseRecovered(consumer="billing"))
    assert health.waits_for == ["source of batch"]
    health(SourceRecovered(consumer="billing", queue="batch"))
    assert health.waits_for == []
    health.stopping()
    assert health.waits_for == ["end"]


async def test_liveness_and_readiness_are_served_over_http(
    health: Health, port: int
) -> None:
    assert await get(port, "/live") == (200, {"live": True})
    not_ready = {"ready": False, "waits_for": ["start"]}
    assert await get(port, "/ready") == (503, not_ready)
    health(STARTED)
    assert await get(port, "/ready?x=1") == (200, {"ready": True, "waits_for": []})
    assert await get(port, "/ready", "HEAD") == (200, None)
    assert await get(port, "/") == (404, {"paths": ["/live", "/ready"]})
    assert await get(port, "/live", "POST") == (405, {"methods": ["GET", "HEAD"]})
    address = f"127.0.0.1:{port}"
    with pytest.raises(ConfigError, match=rf"listen={address}: .*free port"):
        async with listening(address, health.handlers()):
            pass


async def test_a_handler_that_fails_is_logged_and_the_others_are_served(
    health: Health, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_: web.BaseRequest) -> web.StreamResponse:
        raise ValueError("no such metric")

    async with served({**health.handlers(), "/metrics": fail}, caplog) as port:
        assert await get(port, "/metrics") == (500, {})
        assert await get(port, "/live") == (200, {"live": True})
    assert "GET /metrics failed" in caplog.text
    assert "ValueError: no such metric" in caplog.text


async def test_an_invalid_request_does_no_harm(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    for request in (
        b"",
        b"\r\n",
        b"\xff\xff /\r\n\r\n",
        b"x" * 100_000,
        b"GET /" + b"x" * 100_000,
        b"GET / HTTP/1.1\r\nContent-Length: many\r\n\r\n",
    ):
        async with connected(port) as (reader, writer):
            writer.write(request)
            writer.write_eof()
            with suppress(ConnectionError):
                assert not (await reader.read()).startswith(b"HTTP/1.1 200")
    assert await get(port, "/live") == (200, {"live": True})
    assert caplog.text == ""  # otherwise anyone could fill the log


async def test_a_client_that_never_ends_its_request_is_disconnected(
    health: Health, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MAX_SECONDS", 0.2)
    async with served(health.handlers(), caplog) as port:
        for beginning in (b"", b"GET /live HT", b"POST /live HTTP/1.1\r\nX: y\r\n"):
            async with connected(port) as (reader, writer):
                writer.write(beginning)
                assert await reader.read() == b""


async def test_no_task_and_no_port_is_left_open_at_the_end(
    health: Health, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(health.handlers(), caplog) as port, AsyncExitStack() as client:
        server = asyncio.all_tasks()
        reader, writer = await client.enter_async_context(connected(port))
        writer.write(b"GET /live HT")
        assert (await get(port, "/live"))[0] == 200
        leaving = client.pop_all()
    async with leaving:
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
    assert asyncio.all_tasks() <= server
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
