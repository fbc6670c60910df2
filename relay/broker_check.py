"""Asks the broker for a sign of life while there is nothing to publish."""

import asyncio
from typing import Final

from outbox.errors import BrokerUnavailableError, one_line
from relay.breaker import Breaker
from relay.lanes.board import LaneBoard
from relay.publisher import Checkable, Publisher

_LONGEST: Final = 10.0


async def check_broker(
    publisher: Publisher, board: LaneBoard, breaker: Breaker, seconds: float
) -> None:
    """Open and close the breaker by what an idle broker answers, until cancelled.

    While there is something to publish, that tells more. Returns at once if the
    publisher has no `check`.
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
        async with asyncio.timeout(_LONGEST):
            await publisher.check()
    except TimeoutError:
        return f"no sign of life within {_LONGEST:g} s"
    except BrokerUnavailableError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - whatever a publisher does, the relay lives
        return one_line(error)
    return None
