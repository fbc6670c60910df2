"""The heartbeat of a process is sent as long as its event loop runs."""

import asyncio
import os
from pathlib import Path

import pytest

from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.observability import heartbeat
from pillarbox.outbox.observability.heartbeat import beating
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
    async with beating({"PILLARBOX_HEARTBEAT_FILE": str(file)}):
        for _ in range(3):
            age(file)
            await asyncio.to_thread(wait_for, "a beat", lambda: not is_aged(file))
    await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, timeout=60)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_the_heartbeat_stops_while_the_loop_is_blocked(tmp_path: Path) -> None:
    file = tmp_path / "heartbeat"
    async with beating({"PILLARBOX_HEARTBEAT_FILE": str(file)}):
        age(file)
        let_pass(0.1)  # blocks the loop, as a handler might
        assert is_aged(file)


async def test_a_file_that_cannot_be_written_is_reported_at_once(
    tmp_path: Path,
) -> None:
    async with beating({}):
        assert len(asyncio.all_tasks()) == 1, "without the variable there is none"
    missing = {"PILLARBOX_HEARTBEAT_FILE": str(tmp_path / "missing" / "heartbeat")}
    with pytest.raises(
        ConfigError, match=r"missing/heartbeat.*PILLARBOX_HEARTBEAT_FILE"
    ):
        async with beating(missing):
            pass
