"""Fetch the deliveries of one queue from its source, as many as there is room for.

Each queue has its own fetcher and source, so no queue waits for another one's broker;
they share only the slots of the scheduler.
"""

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from pillarbox.inbox.consuming.dispatch import Dispatcher
from pillarbox.inbox.events import (
    DeliveriesReceived,
    DeliveryLanesFree,
    DeliveryLanesWithheld,
    DeliveryReturned,
    SourceLost,
    SourceRecovered,
    SourceWarned,
    StandbyEnded,
    StandingBy,
)
from pillarbox.inbox.source import Delivery, Source
from pillarbox.outbox.errors import BrokerUnavailableError
from pillarbox.outbox.events import Observers
from pillarbox.outbox.gather import end
from pillarbox.outbox.postgres.advisory_lock import END_FOREIGN
from pillarbox.outbox.retry import RECONNECT

_PAUSE: Final = 1.0
_MEMBER: Final = re.compile(r"db-[0-9a-f]{8}(?![0-9a-f])")


class Fetcher:
    """Fetches the deliveries of one queue, as many as there is room for.

    Args:
        is_paused: whether all of its topics are paused, so that nothing is received.
        member: what tells this member from those with another database, if known.
        idle: return when nothing has arrived for this long and no handler is running.

    Attributes:
        standing_by: the topics that another replica receives; empty in an outage of the
            broker, when they are unknown.
    """

    def __init__(
        self,
        consumer: str,
        queue: str,
        source: Source,
        dispatcher: Dispatcher,
        observers: Observers,
        *,
        is_paused: Callable[[], bool] = lambda: False,
        member: str = "",
        idle: timedelta | None = None,
    ) -> None:
        self._about = {"consumer": consumer, "queue": queue}
        self._source = source
        self._is_paused = is_paused
        self._abilities = source.abilities
        self._holders: tuple[str, ...] = ()
        self.standing_by: tuple[str, ...] = ()
        self._stood_by: tuple[str, ...] = ()
        self._member = member
        self._warned: dict[str, datetime] = {}
        self._dispatcher = dispatcher
        self._notify = observers.notify
        self._idle = None if idle is None else idle.total_seconds()

    @property
    def strangers(self) -> list[tuple[datetime, str]]:
        """Warnings about running members with another database, and since when."""
        ids = {name: _MEMBER.search(name) for name in self._abilities.members()}
        reasons = [
            f"{name} uses another database for its handlers: give one of the two"
            " services another Consumer(name=…)"
            for name, found in ids.items()
            if self._member and found is not None and found[0] != self._member
        ]
        now = datetime.now(UTC)
        return [(self._warned.get(reason, now), reason) for reason in reasons]

    async def run(self) -> None:
        """Fetch until cancelled, or until idle.

        Raises:
            BrokerUnavailableError: the broker became unavailable, and `idle` is given.
        """
        failures = 0
        last = time.monotonic()
        while True:
            room = await self._dispatcher.wait_for_room()
            left_out = self._dispatcher.priorities_over_share
            self._abilities.leave_out(self._dispatcher.tenants_over_share, left_out)
            self._notify_warnings()
            try:
                deliveries = await self._receive(room)
            except BrokerUnavailableError as error:
                if self._idle is not None:
                    raise
                failures += 1
                self.standing_by = ()
                delay = RECONNECT.delay(failures).total_seconds()
                self._notify(
                    SourceLost(**self._about, reason=str(error), seconds=delay)
                )
                await asyncio.sleep(delay)
                continue
            if failures:
                failures = 0
                self._notify(SourceRecovered(**self._about))
            self._notify_withheld()
            self._notify_standing_by()
            now = time.monotonic()
            if deliveries:
                self._dispatcher.accept(deliveries)
                self._notify(
                    DeliveriesReceived(**self._about, messages=len(deliveries))
                )
            elif self._dispatcher.is_idle and not left_out:
                if self._idle is not None and now - last >= self._idle:
                    return
                continue
            last = now

    async def _receive(self, room: int) -> Sequence[Delivery]:
        if not self._is_paused():
            return await self._source.receive(limit=room)
        await asyncio.sleep(_PAUSE)
        return ()

    def _notify_warnings(self) -> None:
        reasons = *self._abilities.warnings(), *(reason for _, reason in self.strangers)
        for reason in reasons:
            if reason not in self._warned:
                self._warned[reason] = datetime.now(UTC)
                self._notify(SourceWarned(**self._about, reason=reason))

    def _notify_withheld(self) -> None:
        holders = tuple(self._abilities.foreign_holders())
        if holders == self._holders:
            return
        self._holders = holders
        if holders:
            self._notify(
                DeliveryLanesWithheld(
                    **self._about, holders=holders, remedy=END_FOREIGN
                )
            )
        else:
            self._notify(DeliveryLanesFree(**self._about))

    def _notify_standing_by(self) -> None:
        topics = self.standing_by = tuple(sorted(self._abilities.standing_by()))
        if topics != self._stood_by:
            self._stood_by = topics
            self._notify(
                StandingBy(**self._about, topics=topics)
                if topics
                else StandbyEnded(**self._about)
            )

    async def stop(self, drain: timedelta) -> int:
        """Let handlers finish within `drain`; nack the rest, and return how many."""
        left = await self._dispatcher.stop(drain)
        # Last first, to keep the order if the source requeues each at the front.
        for delivery in reversed(left):
            await self._give_back(delivery)
        return len(left)

    async def _give_back(self, delivery: Delivery) -> None:
        try:
            await delivery.nack()
        except BrokerUnavailableError:
            return  # the broker redelivers it anyway
        self._notify(DeliveryReturned.of(self._about["consumer"], delivery.message))


async def fetch_all(
    fetchers: Sequence[Fetcher], stop: asyncio.Event
) -> Exception | None:
    """Run all fetchers until `stop`, until all end or one fails; return the failure."""
    tasks = [asyncio.create_task(fetcher.run()) for fetcher in fetchers]
    stopped = asyncio.create_task(stop.wait())
    receiving = asyncio.gather(*tasks)
    try:
        await asyncio.wait((receiving, stopped), return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end((stopped, *tasks))
        await asyncio.gather(receiving, return_exceptions=True)
    failures = (None if task.cancelled() else task.exception() for task in tasks)
    return next((f for f in failures if isinstance(f, Exception)), None)


async def stop_all(fetchers: Sequence[Fetcher], drain: timedelta) -> int:
    """Stop all fetchers at once; return how many deliveries were nacked.

    Cancelling this call only ends the drain.
    """
    stopping = [asyncio.create_task(fetcher.stop(drain)) for fetcher in fetchers]
    try:
        await asyncio.wait(stopping)
    except asyncio.CancelledError:
        for task in stopping:
            task.cancel()
        await asyncio.wait(stopping)
    return sum(task.result() for task in stopping)
