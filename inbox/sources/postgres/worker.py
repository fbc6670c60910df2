"""A worker whose messages are handled in its own process.

It claims while handlers run, and settles what has ended, of all lanes together; see
`inbox/sources/postgres/window_lane.py`.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import psycopg

from pillarbox.inbox.sources.postgres.ahead import Searches, find_logged
from pillarbox.inbox.sources.postgres.handover import Handover, TenantSearch
from pillarbox.inbox.sources.postgres.held_message import HeldMessage
from pillarbox.inbox.sources.postgres.settlement import settlement_of
from pillarbox.inbox.sources.postgres.window_lane import WindowLane
from pillarbox.outbox.events import Event
from pillarbox.outbox.gather import end
from pillarbox.outbox.log.claim import claim_batch
from pillarbox.outbox.log.config import ReadingConfig
from pillarbox.outbox.log.database_retry import DATABASE_ERRORS, DatabaseRetry
from pillarbox.outbox.log.lanes.batch import PUBLISHED, ClaimedBatch, Disposition
from pillarbox.outbox.log.lanes.board import LaneBoard
from pillarbox.outbox.log.lanes.lane import Lane
from pillarbox.outbox.log.settle import store_settlement
from pillarbox.outbox.postgres.connection import Link

_GATHER: Final = 0.002
"""Seconds in which outcomes collect before they are stored."""
_CHECK: Final = 1.0
"""Seconds between two searches for handlers that run for long."""


class HandlerWorker:
    """Claims messages, hands them over, settles them. For one event loop; runs once.

    Args:
        link: for claims and settlements: a takeover must know what is stored.
        handlers: gets the messages.
        in_flight: the set to which the worker adds its task.
        stop: set when no new messages may be claimed.
    """

    def __init__(
        self,
        link: Link,
        lanes: LaneBoard,
        handlers: Handover,
        config: ReadingConfig,
        *,
        in_flight: set[asyncio.Task[Any]],
        stop: asyncio.Event,
        notify: Callable[[Event], None],
    ) -> None:
        self._link = link
        self._lanes = lanes
        lanes.make_lane = self._make_lane
        self._handlers = handlers
        self._config = config
        self._searches = Searches(lanes, config)
        self._in_flight = in_flight
        self._stop = stop
        self._claiming = DatabaseRetry(notify)
        self._settling = DatabaseRetry(notify)
        self._last: dict[int, WindowLane] = {}
        self._kept: set[WindowLane] = set()
        """Lanes that aren't claimed until they are settled."""
        self._touched: set[WindowLane] = set()
        """Lanes of which something has ended."""
        self._some = asyncio.Event()

    async def run(self) -> None:
        """Work until cancelled; after `stop`, only settle what has ended."""
        task = asyncio.current_task()
        assert task is not None
        self._in_flight.add(task)
        claiming = asyncio.create_task(self._claim_all())
        settling = asyncio.create_task(self._settle_all())
        stopped = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait(
                {claiming, settling, stopped}, return_when=asyncio.FIRST_COMPLETED
            )
            for each in done - {stopped}:
                each.result()
            await end([claiming])
            self._some.set()
            await settling
        finally:
            await end([claiming, settling, stopped])
            self._in_flight.discard(task)

    def may_begin(self, held: HeldMessage) -> bool:
        """Return whether the handler of a message may begin."""
        if self._is_current(held) and self._lanes.owns([held.lane]):
            return True
        self._let_go(held)
        return False

    def end(self, held: HeldMessage, outcome: Disposition | None) -> None:
        """Record how the handler of a message has ended; None: it was not started."""
        lane = held.lane
        if not held.is_open:
            return
        if not self._is_current(held):
            # Its effects may be lost, and the message has another owner.
            held.is_open = False
            self._let_go(held)
            return
        if outcome is None:
            if lane.give_back(held, time.monotonic()):
                self._handlers.take_back(held)
            elif not lane.is_used:
                self._lanes.leave(lane)
        else:
            lane.end(held, outcome, time.monotonic())
        if outcome is not PUBLISHED and lane.must_wait(held.row.key):
            self._withdraw(lane, held.row.key)
        if lane.must_settle and not lane.in_flight:
            self._lanes.keep(lane)
            self._kept.add(lane)
        self._touched.add(lane)
        self._some.set()

    def _withdraw(self, lane: WindowLane, key: str | None) -> None:
        """Take back the messages that follow one of their key that has to wait."""
        for each in self._handlers.withdraw(
            lambda it: it.lane.number == lane.number and it.message.key == key
        ):
            each.end(None)

    def _make_lane(self, number: int) -> WindowLane:
        stale: dict[Hashable, HeldMessage] = {}
        if number in self._last:
            self._last[number].doubt()
            stale = self._last[number].stale
        self._last[number] = WindowLane(number, stale, self)
        return self._last[number]

    def _is_current(self, held: HeldMessage) -> bool:
        lane = held.lane
        return held.window is lane.window and self._lanes.find(lane.number) is lane

    def _let_go(self, held: HeldMessage) -> None:
        lane = self._last[held.lane.number]
        self._hand_over(lane.let_go(held))
        if not lane.is_used:
            self._lanes.leave(lane)

    async def _claim_all(self) -> None:
        while True:
            await self._lanes.work()
            search = await self._handlers.wants_more(
                can_search=self._searches.are_possible
            )
            _, left_out = self._handlers.left_out
            lanes = self._lanes.pick_all() if search else self._lanes.pick(left_out)
            if lanes:
                await self._claim(lanes, search)

    async def _claim(self, lanes: Sequence[Lane], search: TenantSearch | None) -> None:
        windows = [lane for lane in lanes if isinstance(lane, WindowLane)]
        # A refresh or a search can have found messages in each of them.
        found = [it for it in windows if search is not None or it.needs_refresh]
        try:
            await self._read(lanes, search)
        finally:
            self._touched.update([lane for lane in found if lane.must_move])
            # Those with messages that were withheld are kept already.
            used = [lane for lane in windows if lane.held or lane.needs_claim]
            self._kept.update([lane for lane in used if lane.must_settle])
            self._put_back([lane for lane in windows if lane not in self._kept])
            if self._kept or self._touched:
                self._some.set()

    async def _read(self, lanes: Sequence[Lane], search: TenantSearch | None) -> None:
        try:
            async with self._link.use() as connection:
                self._lanes.opened(self._link.opened_at, lanes)
                if search is not None:
                    windows = [it for it in lanes if isinstance(it, WindowLane)]
                    handed, found = await self._searches.find(
                        connection, windows, search
                    )
                    self._handlers.searched(found)
                    self._hand_over(handed)
                else:
                    batch = await claim_batch(
                        connection, self._lanes, lanes, self._config
                    )
                    reader = self._lanes.reader.name
                    self._take(batch, await find_logged(connection, reader, batch))
        except DATABASE_ERRORS as error:
            for lane in lanes:
                lane.wake()
            await self._claiming.failed(error)
        else:
            self._claiming.succeeded()

    def _take(self, batch: ClaimedBatch, logged: Collection[Hashable] = ()) -> None:
        """Hold the messages of a claim, and hand them over."""
        tenants = [
            row.message.tenant
            for row in batch.rows
            if row.message is not None and row.identity not in logged
        ]
        self._handlers.claimed(tenants, is_cut=batch.is_cut)
        now = time.monotonic()
        handed: list[HeldMessage] = []
        others = batch.release()
        batch.lanes = [
            *batch.lanes,
            *[it for it in others if isinstance(it, WindowLane) and it.needs_claim],
        ]
        for part in batch.by_lane():
            (lane,) = part.lanes
            assert isinstance(lane, WindowLane)
            # Otherwise it was lost in the meantime.
            if lane.window is not None and self._lanes.find(lane.number) is lane:
                extent = part.extents.get(lane.number)
                handed += lane.take(part.rows, part.withheld, extent, now, logged)
                if lane.must_settle:
                    self._kept.add(lane)
                if lane.must_move:
                    self._touched.add(lane)
        self._hand_over(handed)

    def _hand_over(self, handed: Sequence[HeldMessage]) -> None:
        if handed:
            self._handlers.hand_over(handed)

    async def _settle_all(self) -> None:
        is_done = False
        while not is_done:
            waits = [lane.log_by - time.monotonic() for lane in self._kept]
            try:
                async with asyncio.timeout(max(0.0, min(waits, default=_CHECK))):
                    await self._some.wait()
            except TimeoutError:
                self._touched.update(self._leased())
            is_leaving = self._stop.is_set()
            if is_leaving:
                self._touched.update(self._leased())
            else:
                await asyncio.sleep(_GATHER)
            self._some.clear()
            is_done = await self._settle(is_leaving=is_leaving) and is_leaving

    def _leased(self) -> list[WindowLane]:
        lanes = map(self._lanes.find, self._lanes.numbers())
        return [lane for lane in lanes if isinstance(lane, WindowLane)]

    async def _settle(self, *, is_leaving: bool) -> bool:
        """Store what has ended; return whether that succeeded."""
        touched, self._touched = self._touched | self._kept, set()
        lanes = [lane for lane in touched if self._lanes.find(lane.number) is lane]
        try:
            await self._store(lanes, is_leaving=is_leaving)
        except DATABASE_ERRORS as error:
            self._touched |= touched
            await self._settling.failed(error)
            return False
        self._settling.succeeded()
        done = [lane for lane in self._kept if lane.needs_claim or not lane.must_settle]
        self._kept.difference_update(done)
        self._put_back(done)
        return True

    def _put_back(self, lanes: Collection[WindowLane]) -> None:
        used = {lane for lane in lanes if lane.held or lane.stale}
        self._lanes.put_back(lanes, used=used)

    async def _store(self, lanes: Iterable[WindowLane], *, is_leaving: bool) -> None:
        link, began = self._link, time.monotonic()
        if not any(lane.has_ended or lane.held for lane in lanes):
            return
        async with link.use() as connection:
            self._lanes.opened(link.opened_at, lanes)
            parts = [
                (lane, part)
                for lane in lanes
                if (part := lane.settle(began, is_leaving=is_leaving)) is not None
            ]
            settlement = settlement_of(parts)
            due: Mapping[int, datetime] = {}
            if settlement.advances or settlement.others:
                try:
                    due = await store_settlement(
                        connection, self._lanes.reader, settlement
                    )
                except psycopg.errors.UniqueViolation:
                    # Another process has settled one of them.
                    for lane, _ in parts:
                        lane.doubt()
                    return
        settlement.tell_lanes(due, began)
        self._lanes.expect_due(due.values())
        for lane, part in parts:
            lane.stored(part)
            if not lane.is_used:
                self._lanes.leave(lane)
