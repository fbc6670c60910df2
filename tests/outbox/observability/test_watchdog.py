"""The watchdog ends a process only if its event loop is blocked."""

import asyncio
import logging
import re
import threading

import pytest
from typing_extensions import override

from pillarbox.outbox.observability import watchdog
from pillarbox.outbox.observability.watchdog import Watchdog, reporting_blocks
from tests.fixtures.waiting import wait_for


async def test_a_blocked_loop_is_detected() -> None:
    noticed = threading.Event()
    async with Watchdog(0.05, lambda limit: noticed.set()).watching():
        noticed.wait(60)  # waits in the loop's own thread, so the loop can't run
    assert noticed.is_set()


async def test_what_blocks_a_loop_is_named_while_the_loop_is_blocked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watchdog, "_BLOCKED", 0.3)
    reported = threading.Event()
    keep = caplog.handler.emit

    def emit(record: logging.LogRecord) -> None:
        keep(record)
        reported.set()

    monkeypatch.setattr(caplog.handler, "emit", emit)

    def read_a_slow_page() -> None:
        assert reported.wait(60)

    async with reporting_blocks(), reporting_blocks():
        read_a_slow_page()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    where = record.__dict__["values"]["where"]
    page = r"\.read_a_slow_page \(test_watchdog\.py, line \d+\)$"
    assert re.search(page, where), "not the library's"
    assert "in read_a_slow_page" in record.message, "in the stack trace"


async def test_a_running_event_loop_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked, noticed = threading.Semaphore(0), threading.Event()
    watched = Watchdog(0.2, lambda limit: noticed.set())

    class WaitForLoop(threading.Event):
        """Lets the loop run between two checks, however slow the machine is."""

        @override
        def wait(self, timeout: float | None = None) -> bool:
            wait_for("the loop runs", lambda: watched._ticks == 0 or self.is_set())
            looked.release()
            return self.is_set()

    monkeypatch.setattr(watched, "_stopped", WaitForLoop())
    async with watched.watching():
        for _ in range(3 * watchdog._TICKS):
            await asyncio.to_thread(looked.acquire)
    assert not noticed.is_set()
