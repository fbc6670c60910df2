"""The relay: lease lanes, wake, claim, publish, settle. Read this file first.

Its parts run side by side in one event loop. `Lease` holds lanes by a session of its
own, `wake_lanes` says when there may be something, `sweep_lanes` does what comes round
by the clock. A few `Worker`s go round the one loop that matters: pick lanes, claim a
batch, publish it, settle it. No transaction is open while the broker is waited for.
"""

import asyncio
import os
import socket
from collections.abc import Collection, Iterable
from typing import Any, Final

import psycopg

from outbox.errors import ConfigError
from outbox.events import Observer, Observers
from outbox.lane import PRIORITIES, lanes_of
from outbox.postgres.advisory_lock import LOCK_CLASS, Lock
from outbox.postgres.connection import Link, connect
from outbox.postgres.doorbell import Doorbell
from outbox.postgres.late_messages import LIST_MINIMUMS, find_short_retention
from outbox.postgres.lease import Lease, LockHolder, Obstruction
from outbox.postgres.pooler_check import refuse_pooler_async
from relay.adaptive_batch import Portion
from relay.breaker import Breaker
from relay.broker_check import check_broker
from relay.claim import claim_batch
from relay.config import RelayConfig
from relay.events import (
    DoorbellHeld,
    LanesFree,
    LanesWithheld,
    LeaseLost,
    LeaseTaken,
    RelayStarted,
    RelayStopped,
)
from relay.lanes.board import LaneBoard
from relay.oversized import OversizedRows
from relay.publisher import Publisher
from relay.sweep import sweep_lanes
from relay.wakeup import wake_lanes
from relay.worker import Worker

WORKER_SETTINGS: Final = {
    # A mark lost in a crash of the server means that a message is published again,
    # which at-least-once allows; so no settling commit waits for the disk.
    "synchronous_commit": "off",
    # Else each connection plans its statements once for all partitions, only to find
    # that dearer than a plan for the days of the batch: with 90 of them 21 ms to
    # settle and 15 ms to claim, against 1.6 ms each with 8.
    "plan_cache_mode": "force_custom_plan",
    # Else a claim from lanes of about a thousand rows reads each of them to its end and
    # sorts it, though the index has the rows in order: 5 ms for 500 rows instead of 2.
    # Without statistics the same happens to longer lanes.
    "enable_sort": "off",
}

_END_FOREIGN: Final = (
    "SELECT pg_terminate_backend(PID); and keep others out:"
    " REVOKE CONNECT ON DATABASE … FROM PUBLIC, then GRANT it to the roles that need it"
)
_END_RELAYS: Final = "restart the relays that hold more lanes than their share"


class Relay:
    """Publishes committed messages until stopped. For one event loop, to run once.

    Args:
        url: of the database, reached directly, not through a transaction pooler.
        publisher: where to; the relay enters and leaves it.
        config: how; see `RelayConfig`.
        observers: told of everything that happens.
        name: of the publisher, for the dead letters' origin.
    """

    def __init__(
        self,
        url: str,
        publisher: Publisher,
        config: RelayConfig | None = None,
        *,
        observers: Iterable[Observer] = (),
        name: str | None = None,
    ) -> None:
        self._url = url
        self._publisher = publisher
        self._config = config or RelayConfig()
        self._notify = Observers(observers).notify
        self._name = name or type(publisher).__name__
        # PostgreSQL cuts it at 63 bytes, and the part of the relay comes last.
        host = socket.gethostname()[:30]
        self._application = f"pillarbox relay {host} {os.getpid()}"
        self._lease = Lease(
            url,
            lock_class=LOCK_CLASS,
            groups=[lanes_of(priority) for priority in PRIORITIES],
            limit=self._config.lease,
            application_name=f"{self._application} lease",
            relation="outbox.message",
            doorbell=Lock.OUTBOX_DOORBELL,
            # Lanes in flight are handed over when their batch is published and settled.
            patience=2 * self._config.lease + self._config.publish_timeout,
            on_obstruct=self._on_obstruct,
            on_take=self._on_take,
            on_lose=self._on_lose,
        )
        self._sweep_link = Link(url, application_name=f"{self._application} sweep")
        self._lanes = LaneBoard(
            self._lease, self._config.weights, self._config.concurrency
        )
        self._breaker = Breaker(self._notify)
        self._portion = Portion(self._config.publish_timeout)
        self._origin = f"publisher:{self._name}"
        self._oversized = OversizedRows(
            Link(url, application_name=f"{self._application} oversized"),
            self._lanes,
            origin=self._origin,
            notify=self._notify,
        )
        self._withheld = False
        self._at_the_bell: tuple[tuple[LockHolder, ...], ...] = ((), ())
        self._stop = asyncio.Event()
        self._flying: set[asyncio.Task[Any]] = set()

    def stop(self) -> None:
        """Ask the relay to finish what is in flight and to end. Returns at once."""
        self._stop.set()

    async def run(self) -> None:
        """Publish until `stop` or cancellation, then drain and give the lanes back.

        Broken connections are opened anew. What the broker did not confirm within
        `config.drain` stays unsettled, and is published again by the next relay.

        Raises:
            ConfigError: the schema is missing, a right is, or a transaction pooler
                is in between. Only at the start, like the next two.
            DatabaseUnavailableError: the database can't be reached.
            BrokerUnavailableError: the broker can't be reached.
        """
        running = asyncio.create_task(self._run())
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            self.stop()
            await running
            raise

    async def _run(self) -> None:
        await self._check()
        async with self._publisher:
            self._notify(RelayStarted(publisher=self._name))
            async with asyncio.TaskGroup() as group:
                upkeep = [
                    group.create_task(self._lease.run()),
                    group.create_task(self._wake()),
                    group.create_task(self._sweep()),
                    group.create_task(self._check_broker()),
                    group.create_task(self._oversized.run()),
                ]
                workers = [
                    group.create_task(worker.run())
                    for worker in (
                        self._worker() for _ in range(self._config.concurrency)
                    )
                ]
                await self._stop.wait()
                await self._drain(workers)
                for task in upkeep:
                    task.cancel()
            self._notify(RelayStopped())

    async def _check(self) -> None:
        await refuse_pooler_async(self._url)
        async with await connect(
            self._url, application_name=self._application
        ) as connection:
            try:
                await claim_batch(connection, self._lanes, [], self._config)
                cursor = await connection.execute(LIST_MINIMUMS)
                minimums = await cursor.fetchall()
            except (
                psycopg.errors.UndefinedTable,
                psycopg.errors.InvalidSchemaName,
            ) as error:
                raise ConfigError(
                    "the database has no outbox: run pillarbox migrate"
                ) from error
            except psycopg.errors.InsufficientPrivilege as error:
                raise ConfigError(
                    f"{error.diag.message_primary}: GRANT pillarbox_relay TO its role"
                ) from error
        for event in find_short_retention(self._config.retry, minimums):
            self._notify(event)

    async def _wake(self) -> None:
        doorbell = Doorbell(
            self._url,
            lock=Lock.OUTBOX_DOORBELL,
            channel="outbox_message",
            application_name=f"{self._application} doorbell",
        )
        interval = self._config.poll_interval.total_seconds()
        await wake_lanes(self._lanes, doorbell, interval)

    async def _sweep(self) -> None:
        await sweep_lanes(self._lanes, self._sweep_link, self._config, self._notify)

    async def _check_broker(self) -> None:
        await check_broker(
            self._publisher,
            self._lanes,
            self._breaker,
            self._config.broker_check_interval.total_seconds(),
        )

    def _worker(self) -> Worker:
        return Worker(
            Link(
                self._url,
                application_name=f"{self._application} worker",
                settings=WORKER_SETTINGS,
            ),
            self._sweep_link,
            self._lanes,
            self._publisher,
            self._breaker,
            self._portion,
            self._oversized,
            self._config,
            origin=self._origin,
            flying=self._flying,
            stop=self._stop,
            notify=self._notify,
        )

    async def _drain(self, workers: Collection[asyncio.Task[None]]) -> None:
        """Let batches in flight finish for a while, and nothing new begin."""
        flying = [task for task in workers if task in self._flying]
        for task in set(workers).difference(flying):
            task.cancel()
        if flying:
            await asyncio.wait(flying, timeout=self._config.drain.total_seconds())
        for task in flying:
            task.cancel()

    def _on_take(self, lanes: Collection[int]) -> None:
        self._lanes.take(lanes)
        self._notify(LeaseTaken(lanes=tuple(sorted(lanes))))

    def _on_obstruct(self, obstruction: Obstruction) -> None:
        holders = (*obstruction.foreign, *obstruction.greedy)
        if holders:
            self._withheld = True
            self._notify(
                LanesWithheld(
                    holders=tuple(map(str, holders)),
                    remedy=_END_FOREIGN if obstruction.foreign else _END_RELAYS,
                )
            )
        elif self._withheld:
            self._withheld = False
            self._notify(LanesFree())
        known, self._at_the_bell = (
            self._at_the_bell,
            (obstruction.bell_holders, obstruction.bell_sharers),
        )
        for shared, (before, now) in enumerate(
            zip(known, self._at_the_bell, strict=True)
        ):
            if now and now != before:
                self._notify(
                    DoorbellHeld(
                        shared=bool(shared),
                        holders=tuple(map(str, now)),
                        remedy=_END_FOREIGN,
                    )
                )

    def _on_lose(self, lanes: Collection[int]) -> None:
        self._lanes.lose(lanes)
        self._notify(LeaseLost(lanes=tuple(sorted(lanes))))
