"""Checks that the broker responds while there is nothing to publish."""

import asyncio
from typing import Final

from outbox.errors import BrokerUnavailableError, one_line
from relay.breaker import Breaker
from relay.lanes.board import LaneBoard
from relay.publisher import Checkable, Handling, Publisher

_TIMEOUT: Final = 10.0


async def check_broker(
    publisher: Publisher | Handling,
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
        async with asyncio.timeout(_TIMEOUT):
            await publisher.check()
    except TimeoutError:
        return f"no response within {_TIMEOUT:g} s"
    except BrokerUnavailableError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - no publisher may stop the relay
        return one_line(error)
    return None
