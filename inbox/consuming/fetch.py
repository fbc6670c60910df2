"""One queue at work: its source, what is held of it, and the task that fetches more.

Each queue has its own, so that it waits for its broker, and when it is idle, by
itself; only the turns are shared.
"""

import asyncio
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from inbox.consuming.dispatch import Flight
from inbox.events import (
    DeliveriesReceived,
    DeliveriesReclaimed,
    DeliveryReturned,
    SourceFound,
    SourceLost,
)
from inbox.source import Delivery, ReclaimingSource, SelectiveSource, Source
from outbox.errors import BrokerUnavailableError
from outbox.events import Observers
from outbox.retry import RetryPolicy

_RECONNECT: Final = RetryPolicy(
    first_delay=timedelta(milliseconds=100), max_delay=timedelta(seconds=10)
)


class Reception:
    """Fetches the deliveries of one queue, as many as there is room for.

    Args:
        idle: return when nothing has come for so long and nothing is at work.
    """

    def __init__(
        self,
        consumer: str,
        queue: str,
        source: Source,
        flight: Flight,
        observers: Observers,
        *,
        idle: timedelta | None = None,
    ) -> None:
        self._about = {"consumer": consumer, "queue": queue}
        self._source = source
        self._selective = source if isinstance(source, SelectiveSource) else None
        self._reclaiming = source if isinstance(source, ReclaimingSource) else None
        self._reclaimed = 0
        self._flight = flight
        self._notify = observers.notify
        self._idle = None if idle is None else idle.total_seconds()

    async def run(self) -> None:
        """Fetch until cancelled, or idle.

        Raises:
            BrokerUnavailableError: the broker went away, and `idle` is given.
        """
        failures = 0
        last = time.monotonic()
        while True:
            room = await self._flight.wait_for_room()
            if self._selective is not None:
                self._selective.leave_out(self._flight.crowding)
            try:
                deliveries = await self._source.receive(limit=room)
            except BrokerUnavailableError as error:
                if self._idle is not None:
                    raise
                failures += 1
                delay = _RECONNECT.delay(failures).total_seconds()
                self._notify(
                    SourceLost(**self._about, reason=str(error), seconds=delay)
                )
                await asyncio.sleep(delay)
                continue
            if failures:
                failures = 0
                self._notify(SourceFound(**self._about))
            self._tell_reclaimed()
            now = time.monotonic()
            if deliveries:
                self._flight.accept(deliveries)
                self._notify(
                    DeliveriesReceived(**self._about, messages=len(deliveries))
                )
            elif self._flight.is_idle:
                if self._idle is not None and now - last >= self._idle:
                    return
                continue
            last = now

    def _tell_reclaimed(self) -> None:
        if self._reclaiming is None:
            return
        so_far = self._reclaiming.reclaimed
        if so_far > self._reclaimed:
            messages, self._reclaimed = so_far - self._reclaimed, so_far
            self._notify(DeliveriesReclaimed(**self._about, messages=messages))

    async def stop(self, drain: timedelta) -> int:
        """Finish what is at work within `drain`; give back and count what is left."""
        left = await self._flight.stop(drain)
        # Last first: a source that puts each before all others has them in order.
        for delivery in reversed(left):
            await self._give_back(delivery)
        return len(left)

    async def _give_back(self, delivery: Delivery) -> None:
        try:
            await delivery.nack()
        except BrokerUnavailableError:
            return  # comes again without being asked for
        message = delivery.message
        self._notify(
            DeliveryReturned(
                consumer=self._about["consumer"],
                id=message.id,
                topic=message.topic,
                key=message.key,
            )
        )


async def receive_all(
    receptions: Sequence[Reception], stop: asyncio.Event
) -> Exception | None:
    """Let all run until the stop, their return, or the first failure; give that."""
    tasks = [asyncio.create_task(reception.run()) for reception in receptions]
    stopped = asyncio.create_task(stop.wait())
    receiving = asyncio.gather(*tasks)
    try:
        await asyncio.wait((receiving, stopped), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (stopped, *tasks):
            task.cancel()
        await asyncio.gather(receiving, stopped, *tasks, return_exceptions=True)
    failures = (None if task.cancelled() else task.exception() for task in tasks)
    return next((f for f in failures if isinstance(f, Exception)), None)


async def stop_all(receptions: Sequence[Reception], drain: timedelta) -> int:
    """Stop all at once; count what was given back. Cancelling only ends the drain."""
    stopping = [asyncio.create_task(reception.stop(drain)) for reception in receptions]
    try:
        await asyncio.wait(stopping)
    except asyncio.CancelledError:
        for task in stopping:
            task.cancel()
        await asyncio.wait(stopping)
    return sum(task.result() for task in stopping)
