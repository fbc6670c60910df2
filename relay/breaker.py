"""The circuit breaker: while the broker is unavailable, wait instead of trying."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from pillarbox.outbox.errors import BrokerUnavailableError, one_line
from pillarbox.outbox.events import Event
from pillarbox.outbox.log.lanes.board import LaneBoard
from pillarbox.outbox.retry import RECONNECT
from pillarbox.relay.events import BrokerLost, BrokerRecovered
from pillarbox.relay.publisher import Checkable, Publisher

_CHECK_TIMEOUT: Final = 10.0


class Breaker:
    """Opens when the broker is unavailable, for a delay of at most a second.

    After the delay, one batch is tried while the others wait for its outcome. An
    unavailable broker doesn't cost messages an attempt. For one event loop.
    """

    def __init__(self, notify: Callable[[Event], None]) -> None:
        self._notify = notify
        self._failures = 0
        self._delay = 0.0
        self._closed = True
        self._waited = True
        self._probe = asyncio.Lock()

    @property
    def is_closed(self) -> bool:
        """Whether the broker was available when it was last used or checked."""
        return self._closed

    @asynccontextmanager
    async def admit(self) -> AsyncIterator[None]:
        """Admit a batch: immediately while closed, otherwise as the only trial."""
        if self._closed:
            yield
            return
        async with self._probe:
            if not self._waited:
                await asyncio.sleep(self._delay)
                # If this batch turns out to be empty, the next one doesn't wait again.
                self._waited = True
            yield

    def close(self) -> None:
        """Record that the broker accepted a batch, or answered a check."""
        if not self._closed:
            self._closed = self._waited = True
            self._failures = 0
            self._notify(BrokerRecovered())

    def open(self, reason: str) -> None:
        """Record that the broker is unavailable."""
        self._closed = self._waited = False
        self._failures += 1
        self._delay = RECONNECT.delay(self._failures).total_seconds()
        self._notify(BrokerLost(reason=reason, seconds=self._delay))


async def check_broker(
    publisher: Publisher,
    board: LaneBoard,
    breaker: Breaker,
    seconds: float,
) -> None:
    """Check an idle broker, and open or close the breaker accordingly, until cancelled.

    While there are messages, publishing them shows whether the broker is available.
    Returns at once if the publisher has no `check`.
    """
    if not isinstance(publisher, Checkable):
        return
    while True:
        await asyncio.sleep(seconds)
        await board.idle()
        problem = await _problem_of(publisher)
        if problem is None:
            breaker.close()
        elif breaker.is_closed:
            breaker.open(problem)


async def _problem_of(publisher: Checkable) -> str | None:
    try:
        async with asyncio.timeout(_CHECK_TIMEOUT):
            await publisher.check()
    except TimeoutError:
        return f"no response within {_CHECK_TIMEOUT:g} s"
    except BrokerUnavailableError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - no publisher may stop the relay
        return one_line(error)
    return None
