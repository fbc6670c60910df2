"""A process ends although nobody reads its standard error, which is a full pipe."""

import os
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.error import URLError

import pytest

from pillarbox import Message
from pillarbox.outbox.testing.lifetime import free_port
from tests.acceptance.test_watching import INSERT_STUCK, STUCK
from tests.fixtures.processes import RunningProcess, command_line
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for


class Unread:
    """A pipe that is full, until somebody reads it."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._end = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        with suppress(BlockingIOError):
            while True:
                os.write(self._end, b"." * 65536)
        with suppress(BlockingIOError):
            while True:
                os.write(self._end, b".")

    def read(self) -> str:
        """Return everything that is in it now."""
        parts = []
        with suppress(BlockingIOError):
            while True:
                parts.append(os.read(self._end, 1 << 20))
        return b"".join(parts).decode().strip(".")

    def close(self) -> None:
        os.close(self._end)


@pytest.fixture
def unread(tmp_path: Path) -> Iterator[Unread]:
    pipe = Unread(tmp_path / "standard error")
    yield pipe
    pipe.close()


Start = Callable[..., RunningProcess]


@pytest.fixture
def start(unread: Unread, tmp_path: Path) -> Iterator[Start]:
    """Starts a command of a database whose standard error is the full pipe."""
    started: list[RunningProcess] = []
    (tmp_path / "stuck.py").write_text(STUCK)

    def start(url: str, command: str, *options: str) -> RunningProcess:
        environment = {
            "PILLARBOX_DATABASE_URL": url,
            "TEST_URL": url,
            "PYTHONPATH": str(tmp_path),
        }
        line = command_line("pillarbox", command, *options)
        started.append(RunningProcess(line, unread.path, environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def wait_until_ready(port: int) -> None:
    def answered() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                return True
        except URLError:
            return False

    wait_for("it is ready", answered)


def test_sigterm_ends_a_process_whose_log_nobody_reads(
    start: Start, database_url: str
) -> None:
    listen = f"--listen=127.0.0.1:{(port := free_port())}"
    process = start(
        database_url, "consume", "stuck:consumer", listen, "--log-level=debug"
    )
    wait_until_ready(port)
    process.terminate()
    assert process.wait() == 0


def test_the_watchdog_ends_a_process_whose_log_nobody_reads(
    start: Start, database_url: str
) -> None:
    execute(database_url, INSERT_STUCK)
    stuck = ("--codec=stuck:codec", "--watchdog=1s")
    assert start(database_url, "relay", "--broker=memory://", *stuck).wait() == 70


def test_a_failed_command_ends_although_nobody_reads_why(start: Start) -> None:
    url = f"postgresql://127.0.0.1:{free_port()}/nowhere"
    assert start(url, "relay", "--broker=memory://", "--wait=0s").wait() == 2


def test_a_log_that_is_read_late_continues_in_order(
    unread: Unread, start: Start, database_url: str
) -> None:
    port = free_port()
    listen = f"--listen=127.0.0.1:{port}"
    process = start(database_url, "relay", "--broker=memory://", listen)
    log = ""

    def logged(text: str) -> bool:
        nonlocal log
        log += unread.read()
        return text in log

    wait_until_ready(port)
    insert(database_url, Message("t", b""))
    wait_for("RelayStarted", lambda: logged("RelayStarted"))
    process.terminate()
    assert process.wait() == 0
    wait_for("RelayStopped", lambda: logged("RelayStopped"))
    assert log.index("RelayStarted") < log.index("RelayStopped")
    assert log.endswith("\n")
