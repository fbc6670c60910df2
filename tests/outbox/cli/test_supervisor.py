"""Background tasks end with their process, and their errors are raised."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pillarbox.outbox.cli.supervisor import supervise
from pillarbox.outbox.errors import ConfigError
from tests.fixtures.processes import ROOT, command_line


class Process:
    """Runs until it is stopped."""

    def __init__(self) -> None:
        self._stopped = asyncio.Event()
        self.drained = False

    def stop(self) -> None:
        self._stopped.set()

    async def run(self) -> None:
        await self._stopped.wait()
        self.drained = True


async def test_background_tasks_end_once_the_process_has_drained() -> None:
    process = Process()
    ended = []

    async def background() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(process.drained)

    asyncio.get_running_loop().call_soon(process.stop)
    await supervise(process.run, process.stop, [background])
    assert ended == [True]


async def test_a_failing_background_task_stops_the_process_and_is_raised() -> None:
    process = Process()

    async def background() -> None:
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        await supervise(process.run, process.stop, [background])
    assert process.drained


HANGS = """
import asyncio, os, signal
from datetime import timedelta
from pillarbox.outbox.cli import supervisor
from pillarbox.outbox.events import Event
from pillarbox.relay.activity import RelayCounts

supervisor._AFTER_DRAIN = 0.2

async def hang():
    for observer in watched.observers:
        observer(Event())
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.Event().wait()

watched = supervisor.Watched(
    supervisor.Watching(),
    wait=None,
    started=Event,
    counts=RelayCounts(),
    metrics=None,
    scope=None,
    database=str,
)
watched.run(hang, lambda: None, timedelta(0))
"""


def test_a_process_ends_soon_after_its_drain_although_a_server_hangs() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HANGS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0
    assert "a server doesn't answer; exiting" in ended.stderr


def test_a_missing_directory_for_metrics_is_named_in_one_line(tmp_path: Path) -> None:
    line = "relay --database postgresql:///x --broker memory:// --listen 0"
    ended = subprocess.run(
        command_line("pillarbox", *line.split()),
        cwd=ROOT,
        env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "missing")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert "PROMETHEUS_MULTIPROC_DIR" in ended.stderr
    assert ended.stderr.count("\n") == 1
