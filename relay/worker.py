"""A worker takes one batch after another through claim, publish and settle."""

import asyncio
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final

import psycopg

from outbox.errors import DatabaseUnavailableError
from outbox.events import Event
from outbox.postgres.connection import Link, check_writable
from relay.adaptive_batch import BatchLimit
from relay.breaker import Breaker
from relay.claim import Batch, claim_batch, traceparent_of
from relay.config import RelayConfig
from relay.events import (
    BatchClaimed,
    BatchSettled,
    DatabaseLost,
    DatabaseRecovered,
    KeyBlocked,
    MessageDeadLettered,
    MessageDelayed,
)
from relay.lanes.board import LaneBoard
from relay.lanes.lane import Lane
from relay.oversized import OversizedRows
from relay.publish import Answer, publish_batch
from relay.publisher import Publisher
from relay.settle import OUTCOMES, Settlement, decide, settle_batch

_DATABASE_ERRORS: Final = (psycopg.Error, DatabaseUnavailableError)
_FIRST_PAUSE: Final = 0.1
_LAST_PAUSE: Final = 5.0


class Worker:
    """Repeats one loop: pick lanes, claim, publish, settle, put the lanes back.

    Args:
        link: a connection for this worker alone.
        sweep_link: a shared connection for claims that search all partitions; a
            connection that has already opened them is faster.
        oversized: moves the rows that are too large to load.
        in_flight: the set to which the worker adds its task while it has a batch.
        stop: set when no new batch may be started.
    """

    def __init__(
        self,
        link: Link,
        sweep_link: Link,
        lanes: LaneBoard,
        publisher: Publisher,
        breaker: Breaker,
        batch_limit: BatchLimit,
        oversized: OversizedRows,
        config: RelayConfig,
        *,
        origin: str,
        in_flight: set[asyncio.Task[Any]],
        stop: asyncio.Event,
        notify: Callable[[Event], None],
    ) -> None:
        self._link = link
        self._sweep_link = sweep_link
        self._lanes = lanes
        self._publisher = publisher
        self._breaker = breaker
        self._batch_limit = batch_limit
        self._oversized = oversized
        self._config = config
        self._origin = origin
        self._in_flight = in_flight
        self._stop = stop
        self._notify = notify
        self._claim_pause = _FIRST_PAUSE
        self._is_checked = False

    async def run(self) -> None:
        """Process batches until cancelled, or until `stop` after the current one."""
        task = asyncio.current_task()
        assert task is not None
        try:
            while not self._stop.is_set():
                await self._lanes.work()
                async with self._breaker.admit():
                    lanes = self._lanes.pick()
                    if not lanes:
                        continue
                    self._in_flight.add(task)
                    try:
                        await self._carry(lanes)
                    finally:
                        self._in_flight.discard(task)
                        self._lanes.put_back(lanes)
        finally:
            await self._link.close()

    async def _carry(self, lanes: Sequence[Lane]) -> None:
        batch = await self._claim(lanes)
        if batch is None:
            return
        self._oversized.add(batch.oversized)
        answers: Sequence[Answer] = []
        if batch.rows:
            if await self._can_record():
                answers = await self._publish(batch)
            else:
                answers = [None] * len(batch.rows)
        settlement = decide(batch.rows, answers, self._config.retry)
        settlement.add_unpublished(batch)
        self._withdraw(lanes, settlement)
        self._remember(batch, settlement)
        await self._settle(lanes, settlement)

    async def _publish(self, batch: Batch) -> Sequence[Answer]:
        answers, lost = await publish_batch(
            batch.rows,
            self._publisher,
            self._config,
            batch_limit=self._batch_limit,
            leased=lambda: self._lanes.owns(batch.lanes),
            notify=self._notify,
        )
        if any(answers[i] for i, row in enumerate(batch.rows) if row.message):
            self._breaker.close()
        if lost is not None:
            self._breaker.open(str(lost))
            for lane in batch.lanes:
                # The outage may be long, so reread the state of the lanes.
                lane.needs_refresh = True
        return answers

    def _withdraw(self, lanes: Sequence[Lane], settlement: Settlement) -> None:
        """Withdraw deferrals in lanes that another relay may have leased by now.

        That relay may have read the log already, so it would not notice a key blocked
        now and would publish later messages of that key.
        """
        if settlement.deferred:
            settlement.withdraw_deferrals(
                {lane.number for lane in lanes if not self._lanes.owns([lane])}
            )

    async def _claim(self, lanes: Sequence[Lane]) -> Batch | None:
        started = time.monotonic()
        is_sweep = any(lane.needs_refresh for lane in lanes)
        link = self._sweep_link if is_sweep else self._link
        try:
            async with link.lock:
                connection = await link.connection()
                batch = await claim_batch(connection, self._lanes, lanes, self._config)
        except _DATABASE_ERRORS as error:
            for lane in lanes:
                lane.wake()
            await self._pause_claims(error, link)
            return None
        self._is_checked = self._is_checked and not is_sweep
        if not batch.rows:
            self._end_pauses()
        else:
            self._notify(
                BatchClaimed(
                    lanes=len({row.lane for row in batch.rows}),
                    messages=len(batch.rows),
                    seconds=time.monotonic() - started,
                )
            )
        return batch

    async def _can_record(self) -> bool:
        """Return whether the session that records what is published can do so.

        It may be gone or read-only, although the claim's session isn't.
        """
        try:
            connection = await self._link.connection()
            if not self._is_checked:
                await check_writable(connection, OUTCOMES)
        except _DATABASE_ERRORS as error:
            await self._pause_claims(error, self._link)
            return False
        self._is_checked = True
        self._end_pauses()
        return True

    def _remember(self, batch: Batch, settlement: Settlement) -> None:
        """Block the keys that must wait; make untouched messages claimable again."""
        lanes = {lane.number: lane for lane in batch.lanes}
        for row in settlement.untouched:
            lane = lanes[row.lane]
            if row.place is None:
                lane.rewind(row.seq, row.created_at)
            else:
                lane.deferrals.release(row.place)
                lane.wake()
        for row in settlement.scheduled:
            lanes[row.lane].deferrals.note_created(row.created_at)
        for row in settlement.held:
            assert row.key is not None
            deferrals = lanes[row.lane].deferrals
            deferrals.note_created(row.created_at)
            deferrals.hold(row.key, row.seq)
        for row, reason, _ in settlement.waiting:
            deferrals = lanes[row.lane].deferrals
            deferrals.note_created(row.created_at)
            attempts = row.attempts + 1
            if row.key is None:
                self._notify(
                    MessageDelayed(
                        id=row.id,
                        topic=row.topic,
                        attempts=attempts,
                        reason=reason,
                        traceparent=traceparent_of(row),
                    )
                )
                continue
            deferrals.block(row.key)
            self._notify(
                KeyBlocked(
                    id=row.id,
                    topic=row.topic,
                    key=row.key,
                    attempts=attempts,
                    reason=reason,
                    traceparent=traceparent_of(row),
                )
            )

    async def _settle(self, lanes: Sequence[Lane], settlement: Settlement) -> None:
        """Retry until the settlement is recorded; otherwise a claim would republish.

        This also applies if the lease is lost, because messages that the broker acked
        are published in any case.
        """
        if settlement.empty:
            return
        started = time.monotonic()
        pause = _FIRST_PAUSE
        due: dict[int, datetime] = {}
        while True:
            try:
                connection = await self._link.connection()
                due = await settle_batch(connection, settlement, origin=self._origin)
            except _DATABASE_ERRORS as error:
                await self._pause(error, pause, self._link)
                pause = min(pause * 2, _LAST_PAUSE)
                # The lease may have been lost in the meantime.
                self._withdraw(lanes, settlement)
            else:
                break
        for lane in lanes:
            if lane.number in due:
                lane.deferrals.expect(due[lane.number])
        self._found_after(pause)
        self._notify(
            BatchSettled(
                published=len(settlement.published),
                retried=len(settlement.waiting),
                dead_lettered=len(settlement.dead_lettered),
                seconds=time.monotonic() - started,
            )
        )
        for row, reason in settlement.dead_lettered:
            self._notify(
                MessageDeadLettered(
                    id=row.id,
                    topic=row.topic,
                    attempts=row.attempts + 1,
                    reason=reason,
                    traceparent=traceparent_of(row),
                )
            )

    def _end_pauses(self) -> None:
        self._found_after(self._claim_pause)
        self._claim_pause = _FIRST_PAUSE

    async def _pause_claims(self, error: Exception, link: Link) -> None:
        # Short at first: if the server restarted, only the connection is stale.
        await self._pause(error, self._claim_pause, link)
        self._claim_pause = min(self._claim_pause * 2, _LAST_PAUSE)

    async def _pause(self, error: Exception, seconds: float, link: Link) -> None:
        self._notify(DatabaseLost.of(error, seconds))
        async with link.lock:
            await link.close()
        await asyncio.sleep(seconds)

    def _found_after(self, pause: float) -> None:
        if pause > _FIRST_PAUSE:
            self._notify(DatabaseRecovered())
