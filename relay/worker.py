"""A worker takes one batch after another through claim, publish and settle."""

import asyncio
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import psycopg

from outbox.events import Event
from outbox.gather import gather
from outbox.postgres.connection import Connection, Link
from relay.adaptive_batch import BatchLimit
from relay.breaker import Breaker
from relay.claim import Batch, claim_batch, traceparent_of
from relay.config import RelayConfig
from relay.database_retry import DATABASE_ERRORS, DatabaseRetry
from relay.events import (
    BatchClaimed,
    BatchSettled,
    MessageDeadLettered,
    MessageRefused,
)
from relay.lanes.board import LaneBoard
from relay.lanes.lane import Lane
from relay.oversized import OversizedRows
from relay.publish import Answer, publish_batch
from relay.publisher import Handling, Publisher
from relay.settle import (
    Settlement,
    complete,
    decide,
    remember,
    settle_batch,
)


class Worker:
    """Repeats one loop: pick lanes, claim, publish, settle, put the lanes back.

    Args:
        link: a connection, which workers may share.
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
        publisher: Publisher | Handling,
        breaker: Breaker,
        batch_limit: BatchLimit,
        oversized: OversizedRows,
        config: RelayConfig,
        *,
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
        self._in_flight = in_flight
        self._stop = stop
        self._notify = notify
        self._claims = DatabaseRetry(notify)
        self._settlements = DatabaseRetry(notify)

    async def run(self) -> None:
        """Process batches until cancelled, or until `stop` after the current one."""
        task = asyncio.current_task()
        assert task is not None
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

    async def _carry(self, lanes: Sequence[Lane]) -> None:
        try:
            batch = await self._claim(lanes)
            if batch is None:
                return
            # A lane in which nothing was found doesn't wait for the others' answers.
            released = batch.release()
            lanes = batch.lanes
            self._lanes.put_back(released)
            if isinstance(self._publisher, Handling):
                # Nor does one whose handlers are quick wait for another's.
                parts = batch.by_lane()
                lanes = []
                await gather(self._end(part) for part in parts)
            else:
                await self._finish(batch)
        finally:
            self._lanes.put_back(lanes)

    async def _end(self, part: Batch) -> None:
        try:
            await self._finish(part)
        finally:
            self._lanes.put_back(part.lanes)

    async def _finish(self, batch: Batch) -> None:
        answers: Sequence[Answer] = []
        if batch.rows:
            if await self._can_record():
                answers = await self._publish(batch)
            else:
                answers = [None] * len(batch.rows)
        settlement = decide(batch.rows, answers, self._config.retry)
        complete(settlement, batch)
        remember(settlement, batch)
        await self._settle(settlement)
        # Only now, so that their entries exist.
        self._oversized.add(row for row, _ in settlement.of("aside"))

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

    async def _claim(self, lanes: Sequence[Lane]) -> Batch | None:
        started = time.monotonic()
        is_sweep = any(lane.needs_refresh for lane in lanes)
        link = self._sweep_link if is_sweep else self._link
        try:
            async with link.lock:
                connection = await link.connection()
                await self._doubt(connection, link, lanes)
                batch = await claim_batch(connection, self._lanes, lanes, self._config)
        except DATABASE_ERRORS as error:
            for lane in lanes:
                lane.wake()
            await self._claims.failed(error, link)
            return None
        if not batch.rows:
            self._claims.succeeded()
        else:
            self._notify(
                BatchClaimed(
                    lanes=len({row.lane for row in batch.rows}),
                    messages=len(batch.rows),
                    seconds=time.monotonic() - started,
                )
            )
        return batch

    async def _doubt(
        self, connection: Connection, link: Link, lanes: Sequence[Lane]
    ) -> None:
        """Forget the lanes of which a crash of the server lost a settlement.

        It has not crashed since the session began.
        """
        started = time.monotonic()
        doubtful = {
            lane.number: lane
            for lane in lanes
            if lane.progress is not None and lane.known_at < link.opened_at
        }
        if not doubtful:
            return
        numbers = {
            number: lane.progress.number
            for number, lane in doubtful.items()
            if lane.progress is not None
        }
        changed, _ = await self._lanes.reader.find_changed(connection, numbers)
        for number, lane in doubtful.items():
            lane.known_at = started
            if number in changed:
                lane.doubt()

    async def _can_record(self) -> bool:
        """Return whether the session that records what is published is open.

        It may be gone, although the claim's session isn't.
        """
        try:
            async with self._link.lock:
                await self._link.connection()
        except DATABASE_ERRORS as error:
            await self._claims.failed(error, self._link)
            return False
        self._claims.succeeded()
        return True

    async def _settle(self, settlement: Settlement) -> None:
        """Retry until the settlement is recorded; otherwise a claim would republish.

        This also applies if the lease is lost, because messages that the broker acked
        are published in any case. If another process has settled a lane in the
        meantime, it has published its messages, too.
        """
        if not settlement.positions:
            return
        started = time.monotonic()
        due: dict[int, datetime] = {}
        while settlement.positions:
            began = time.monotonic()
            try:
                async with self._link.lock:
                    connection = await self._link.connection()
                    if await self._is_settled(connection, settlement):
                        break
                    due = await settle_batch(connection, self._lanes.reader, settlement)
            except psycopg.errors.UniqueViolation:
                for one in settlement.positions:
                    one.lane.known_at = 0
            except DATABASE_ERRORS as error:
                await self._settlements.failed(error, self._link)
            else:
                for one in settlement.positions:
                    one.lane.known_at = began
                break
        for one in settlement.positions:
            one.lane.progress = one.after
            if one.lane.number in due:
                one.lane.deferrals.expect(due[one.lane.number])
        self._settlements.succeeded()
        if not settlement.positions:
            return
        waiting = settlement.of("refused", "postponed")
        dead_lettered = settlement.of("dead_lettered")
        self._notify(
            BatchSettled(
                published=len(settlement.of("published")),
                retried=len(waiting),
                dead_lettered=len(dead_lettered),
                seconds=time.monotonic() - started,
            )
        )
        for row, outcome in waiting:
            self._notify(
                MessageRefused(
                    id=row.id,
                    topic=row.topic,
                    key=row.key,
                    attempts=row.attempts + 1,
                    reason=outcome.reason or "",
                    traceparent=traceparent_of(row),
                )
            )
        for row, outcome in dead_lettered:
            self._notify(
                MessageDeadLettered(
                    id=row.id,
                    topic=row.topic,
                    attempts=row.attempts + 1,
                    reason=outcome.reason or "",
                    traceparent=traceparent_of(row),
                )
            )

    async def _is_settled(self, connection: Connection, settlement: Settlement) -> bool:
        """After a doubt, find out whether an earlier try to settle has committed.

        If not, drop the lanes that have another settlement than when they were claimed.
        """
        started = time.monotonic()
        positions = settlement.positions
        if all(one.lane.known_at >= self._link.opened_at for one in positions):
            return False
        changed, own = await self._lanes.reader.find_changed(
            connection, {one.lane.number: one.after.number - 1 for one in positions}
        )
        for one in positions:
            one.lane.known_at = started
            # What it logged may be due.
            one.lane.needs_refresh = one.lane.needs_refresh or bool(own)
            if not own and one.lane.number in changed:
                one.lane.doubt()
        if not own:
            settlement.drop(changed)
        return bool(own)
