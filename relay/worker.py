"""A worker takes one batch after another through claim, publish and settle."""

import asyncio
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import psycopg

from pillarbox.outbox.events import Event
from pillarbox.outbox.log.claim import claim_batch
from pillarbox.outbox.log.database_retry import DATABASE_ERRORS, DatabaseRetry
from pillarbox.outbox.log.lanes.batch import ClaimedBatch
from pillarbox.outbox.log.lanes.board import LaneBoard
from pillarbox.outbox.log.lanes.lane import Lane
from pillarbox.outbox.log.settle import Settlement, store_settlement
from pillarbox.outbox.postgres.connection import Connection, Link
from pillarbox.relay.adaptive_batch import BatchLimit
from pillarbox.relay.breaker import Breaker
from pillarbox.relay.config import RelayConfig
from pillarbox.relay.events import (
    BatchClaimed,
    BatchSettled,
    MessageDeadLettered,
    MessageRefused,
)
from pillarbox.relay.oversized import OversizedRows
from pillarbox.relay.publish import Answer, publish_batch
from pillarbox.relay.publisher import Acked, InDatabase, Publisher
from pillarbox.relay.settle import settle

_Session: TypeAlias = tuple[Link, Connection]
"""Where a batch was claimed, with the lock of its link."""


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
        publisher: Publisher,
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
        # Other acks may be lost with the settlement.
        self._keeps_acks = not isinstance(publisher, InDatabase)
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
            claim = await self._claim(lanes)
            if claim is None:
                return
            batch, session = claim
            # Lanes without messages are free at once.
            released = batch.release()
            lanes = batch.lanes
            self._lanes.put_back(released)
            await self._finish(batch, session)
        finally:
            self._lanes.put_back(lanes)

    async def _finish(self, batch: ClaimedBatch, session: _Session) -> None:
        """Publish and settle a batch; if its session is lost, claim it again.

        A server that crashed may have lost the batch, and a standby that took over may
        have other messages with the same numbers and transaction ids. So only the
        session that has claimed settles. This continues until a settlement is recorded,
        even if the lease is lost, because what the broker acked is published anyway.
        """
        while not await self._process(batch, session):
            for lane in batch.lanes:
                lane.doubt()
            while (claim := await self._claim(batch.lanes)) is None:
                pass
            batch, session = claim

    async def _process(self, batch: ClaimedBatch, session: _Session) -> bool:
        """Publish and settle a batch; return whether the settlement was stored."""
        answers = await self._publish(batch) if batch.rows else []
        settlement = settle(batch, answers, self._config.retry)
        is_stored = await self._store(settlement, session)
        if self._lanes.acked or not is_stored:
            for row, answer in zip(batch.rows, answers, strict=True):
                if isinstance(answer, Acked):
                    self._lanes.acked.pop(row.identity, None)
                    if self._keeps_acks and not is_stored:
                        self._lanes.acked[row.identity] = None
        if is_stored:
            # Only now, so that their entries exist.
            self._oversized.add(row for row, _ in settlement.of("aside"))
        return is_stored

    async def _publish(self, batch: ClaimedBatch) -> Sequence[Answer]:
        """Publish what the broker has not acked yet; return the answers for all."""
        rows, acked = batch.rows, set[Hashable]()
        if self._lanes.acked:
            acked = {row.identity for row in rows} & self._lanes.acked.keys()
            rows = [row for row in rows if row.identity not in acked]
        answers, lost = await publish_batch(
            rows,
            self._publisher,
            self._config,
            batch_limit=self._batch_limit,
            leased=lambda: self._lanes.owns(batch.lanes),
            notify=self._notify,
        )
        if any(answers[i] for i, row in enumerate(rows) if row.problem is None):
            self._breaker.close()
        if lost is not None:
            self._breaker.open(str(lost))
        if not acked:
            return answers
        rest = iter(answers)
        return [Acked() if row.identity in acked else next(rest) for row in batch.rows]

    async def _claim(
        self, lanes: Sequence[Lane]
    ) -> tuple[ClaimedBatch, _Session] | None:
        started = time.monotonic()
        is_sweep = any(lane.needs_refresh for lane in lanes)
        link = self._sweep_link if is_sweep else self._link
        try:
            async with link.use() as connection:
                self._lanes.opened(link.opened_at, lanes)
                batch = await claim_batch(connection, self._lanes, lanes, self._config)
        except DATABASE_ERRORS as error:
            for lane in lanes:
                lane.wake()
            await self._claims.failed(error)
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
        return batch, (link, connection)

    async def _store(self, settlement: Settlement, session: _Session) -> bool:
        """Store a settlement, if the session is still open that claimed the batch.

        If another process has settled a lane in the meantime, it has published the
        lane's messages, too.
        """
        began = time.monotonic()
        if not settlement.advances:
            self._settlements.succeeded()
            settlement.tell_lanes({}, began)
            return True
        link, connection = session
        started = began
        try:
            async with link.use(connection):
                began = time.monotonic()
                try:
                    due = await store_settlement(
                        connection, self._lanes.reader, settlement
                    )
                except psycopg.errors.UniqueViolation:
                    return False
        except DATABASE_ERRORS as error:
            await self._settlements.failed(error)
            return False
        self._settlements.succeeded()
        settlement.tell_lanes(due, began)
        self._lanes.expect_due(due.values())
        self._report(settlement, time.monotonic() - started)
        return True

    def _report(self, settlement: Settlement, seconds: float) -> None:
        waiting = settlement.of("refused", "postponed")
        dead_lettered = settlement.of("dead_lettered")
        published = settlement.published + len(settlement.of("published"))
        self._notify(
            BatchSettled(
                published=published,
                retried=len(waiting),
                dead_lettered=len(dead_lettered),
                seconds=seconds,
            )
        )
        for row, it in waiting:
            self._notify(
                MessageRefused(
                    id=row.id,
                    topic=row.topic,
                    key=row.key,
                    attempts=row.attempts + 1,
                    reason=it.reason or "",
                    traceparent=row.traceparent,
                )
            )
        for row, it in dead_lettered:
            self._notify(
                MessageDeadLettered(
                    id=row.id,
                    topic=row.topic,
                    attempts=row.attempts + 1,
                    reason=it.reason or "",
                    traceparent=row.traceparent,
                )
            )
