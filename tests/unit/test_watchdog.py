"""The watchdog bites when the loop is stuck, and only then."""

import asyncio
import threading

import pytest
from typing_extensions import override

from outbox.errors import ConfigError
from outbox.observability import watchdog
from outbox.observability.watchdog import Watchdog
from tests.fixtures.waiting import wait_for


async def test_a_loop_that_stands_still_is_noticed() -> None:
    bitten = threading.Event()
    async with Watchdog(0.05, lambda limit: bitten.set()).watching():
        bitten.wait(60)  # in the loop's own thread: it can't turn
    assert bitten.is_set()


async def test_a_loop_that_turns_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, bitten = threading.Semaphore(0), threading.Event()
    watched = Watchdog(0.2, lambda limit: bitten.set())

    class Patience(threading.Event):
        """However slow this machine is, the loop has its turn between two looks."""

        @override
        def wait(self, timeout: float | None = None) -> bool:
            wait_for("the loop turns", lambda: watched._silent == 0 or self.is_set())
            looked.release()
            return self.is_set()

    monkeypatch.setattr(watched, "_over", Patience())
    async with watched.watching():
        for _ in range(3 * watchdog._TICKS):
            await asyncio.to_thread(looked.acquire)
    assert not bitten.is_set()


@pytest.mark.parametrize("limit", [-1.0, float("nan"), float("inf")])
def test_a_limit_that_is_none_is_refused(limit: float) -> None:
    with pytest.raises(ConfigError, match="watchdog="):
        Watchdog(limit)
