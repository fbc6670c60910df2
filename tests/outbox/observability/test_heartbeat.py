"""The heartbeat of a process is sent as long as its event loop runs."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from outbox.errors import ConfigError
from outbox.observability import heartbeat
from outbox.observability.heartbeat import Heartbeat
from tests.fixtures.waiting import let_pass, wait_for

LONG_AGO = 1.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL_SECONDS", 0.01)


def age(file: Path) -> None:
    os.utime(file, (LONG_AGO, LONG_AGO))


def is_aged(file: Path) -> bool:
    return file.stat().st_mtime == LONG_AGO


async def test_the_heartbeat_touches_its_file_until_the_process_ends(
    tmp_path: Path,
) -> None:
    file = tmp_path / "heartbeat"
    async with Heartbeat(file).beating():
        for _ in range(3):
            age(file)
            await asyncio.to_thread(wait_for, "a beat", lambda: not is_aged(file))
    await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, timeout=60)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_the_heartbeat_stops_while_the_loop_is_blocked(tmp_path: Path) -> None:
    file = tmp_path / "heartbeat"
    async with Heartbeat(file).beating():
        age(file)
        let_pass(0.1)  # blocks the loop, as a handler might
        assert is_aged(file)


@pytest.mark.parametrize("abstract", [False, True])
async def test_systemd_is_notified_of_start_heartbeats_and_stop(
    tmp_path: Path, abstract: bool
) -> None:
    name = (
        f"@pillarbox-{os.getpid()}" if abstract else str(tmp_path / "user@1" / "notify")
    )
    (tmp_path / "user@1").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(f"\0{name[1:]}" if abstract else name)
        systemd.setblocking(False)
        loop = asyncio.get_running_loop()
        news: list[bytes] = []
        async with Heartbeat.from_environment({"NOTIFY_SOCKET": name}).beating():
            async with asyncio.timeout(60):
                while news.count(b"WATCHDOG=1") < 2:
                    news.append(await loop.sock_recv(systemd, 100))
        while news[-1] != b"STOPPING=1":
            news.append(await loop.sock_recv(systemd, 100))
    assert news[0] == b"READY=1"
    assert set(news[1:-1]) == {b"WATCHDOG=1"}


async def test_a_file_that_cannot_be_written_is_reported_at_once(
    tmp_path: Path,
) -> None:
    async with Heartbeat.from_environment({}).beating():
        assert len(asyncio.all_tasks()) == 1, "without variables there is no heartbeat"
    file = tmp_path / "missing" / "heartbeat"
    with pytest.raises(
        ConfigError, match=r"missing/heartbeat.*PILLARBOX_HEARTBEAT_FILE"
    ):
        async with Heartbeat.from_environment(
            {"PILLARBOX_HEARTBEAT_FILE": str(file)}
        ).beating():
            pass
