"""Readiness follows the events of a process, and is told over HTTP."""

import asyncio
import json
import re
from typing import Any

import pytest

from inbox.events import (
    ConsumerStarted,
    DatabaseFound,
    DatabaseLost,
    SourceFound,
    SourceLost,
)
from outbox.errors import ConfigError
from outbox.observability.health import Health
from outbox.observability.listen_address import ListenAddress

ANYWHERE = ListenAddress("", 0)
STARTED = ConsumerStarted(consumer="billing", topics=())


@pytest.fixture
def health() -> Health:
    return Health(
        ConsumerStarted, {SourceLost: SourceFound, DatabaseLost: DatabaseFound}
    )


async def get(
    port: int, path: str, method: str = "GET"
) -> tuple[int, dict[str, Any] | None]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = f"{method} {path} HTTP/1.1\r\nHost: x\r\nUser-Agent: kubelet\r\n\r\n"
    writer.write(request.encode())
    async with asyncio.timeout(60):
        answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.decode().partition("\r\n\r\n")
    return int(head.split()[1]), json.loads(body) if body else None


def port_of(caplog: pytest.LogCaptureFixture) -> int:
    found = re.search(r"health endpoint listening on \S*:(\d+)", caplog.text)
    assert found is not None
    return int(found[1])


def test_a_process_is_ready_when_it_has_started_until_it_stops(health: Health) -> None:
    assert health.waits_for == ["start"]
    health(STARTED)
    assert health.waits_for == []
    health.stopping()
    assert health.waits_for == ["end"]


def test_it_is_ready_when_all_that_was_lost_is_found(health: Health) -> None:
    health(STARTED)
    lost: dict[str, Any] = {"consumer": "billing", "reason": "gone", "seconds": 1.0}
    health(SourceLost(queue="batch", **lost))
    health(SourceLost(queue="default", **lost))
    health(DatabaseLost(**lost))
    assert health.waits_for == ["database", "source of batch", "source of default"]
    health(SourceFound(consumer="billing", queue="default"))
    health(DatabaseFound(consumer="billing"))
    assert health.waits_for == ["source of batch"]
    health(SourceFound(consumer="billing", queue="batch"))
    assert health.waits_for == []


async def test_both_are_told_over_http(
    health: Health, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pillarbox")
    async with health.served(ANYWHERE):
        port = port_of(caplog)
        assert await get(port, "/live") == (200, {"live": True})
        not_ready = {"ready": False, "waits_for": ["start"]}
        assert await get(port, "/ready") == (503, not_ready)
        health(STARTED)
        assert await get(port, "/ready?x=1") == (200, {"ready": True, "waits_for": []})
        assert await get(port, "/ready", "HEAD") == (200, None)
        assert (await get(port, "/"))[0] == 404
        assert (await get(port, "/live", "POST"))[0] == 405


@pytest.mark.parametrize("request_", [b"", b"\r\n", b"\xff\xff /\r\n", b"x" * 100_000])
async def test_what_is_no_request_hurts_nobody(
    health: Health, caplog: pytest.LogCaptureFixture, request_: bytes
) -> None:
    caplog.set_level("INFO", "pillarbox")
    async with health.served(ANYWHERE):
        port = port_of(caplog)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_)
        writer.write_eof()
        try:
            async with asyncio.timeout(60):
                assert await reader.read() == b""
        except ConnectionError:
            pass
        writer.close()
        assert (await get(port, "/live"))[0] == 200


async def test_a_port_that_is_taken_is_told(
    health: Health, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pillarbox")
    async with health.served(ANYWHERE):
        port = port_of(caplog)
        with pytest.raises(ConfigError, match=f"health-listen=:{port}: .*free port"):
            async with health.served(ListenAddress("", port)):
                pass
