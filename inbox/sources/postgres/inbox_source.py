"""A source that reads `inbox.message`, to which relays of earlier versions copied.

The replicas of a consumer share 16 lanes through leases, so a key belongs to one
replica at a time. Claiming writes nothing; see `lanes` for what the process keeps in
memory.
"""

import asyncio
import time
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from typing import Final, Self

import psycopg

from inbox.consuming.outcomes import Outcomes
from inbox.consuming.rollout import warn_unhandled
from inbox.source import Abilities, Arrived, Delivery, EntryDelivery
from inbox.sources.postgres.lanes import ClaimedDelivery, DeliveryLanes
from inbox.sources.postgres.queue import AWAY, Outcome, Queue
from outbox.brokers.postgres import PostgresOptions
from outbox.errors import (
    BrokerUnavailableError,
    ConfigError,
    DatabaseUnavailableError,
    message_of,
)
from outbox.gather import end
from outbox.lane import BUCKETS
from outbox.log.reader import CLAIM_SETTINGS
from outbox.postgres.advisory_lock import Lock, consumer_class
from outbox.postgres.connection import Link, Server, conninfo
from outbox.postgres.doorbell import Armed, Doorbell
from outbox.postgres.lease import Lease
from outbox.postgres.pooler_check import refuse_pooler_async
from outbox.postgres.remedy import remedy_of
from outbox.retry import jittered
from outbox.url import without_password

SESSION_SETTINGS: Final = {
    **CLAIM_SETTINGS,
    # Each statement reads its rows from an index, in index order. Until a partition has
    # been analyzed, the planner would rather read and sort all of a tenant's backlog.
    "enable_bitmapscan": "off",
    "enable_seqscan": "off",
}
_BUSY: Final = 0.02
"""Seconds without a pause after which writers needn't ring."""
_FIRST_PAUSE: Final = 0.005
_LAST_PAUSE: Final = 0.05
_MAX_WAITING: Final = 50_000


OUTCOMES: Final = ("inbox.position", "inbox.deferral")
"""The tables into which a consumer inserts what became of its deliveries."""


class InboxSource:
    """A source of one consumer's deliveries; entering it subscribes the consumer.

    Args:
        url: the database's URL, for a direct connection, not a transaction pooler.
        consumer: the consumer's name; its replicas share the deliveries.
        topics: the topics to subscribe to: exact ones, or prefixes followed by `*`.
        poll_interval: the maximum wait unless woken; each wait is jittered.
        sweep_interval: how often to look for deliveries that committed late, or whose
            retry is due.
        answer_timeout: how long to wait for the database to answer a statement.
        leave_timeout: how long leaving waits for the outcomes to be written.
    """

    messaging_system = "postgres"

    def __init__(
        self,
        url: str,
        *,
        consumer: str,
        topics: Sequence[str],
        poll_interval: timedelta = timedelta(seconds=1),
        sweep_interval: timedelta = timedelta(seconds=5),
        answer_timeout: timedelta = timedelta(seconds=20),
        leave_timeout: timedelta = timedelta(seconds=10),
    ) -> None:
        url, options = PostgresOptions.parse(url)
        conninfo(url)
        self._url = url
        self._topics = list(topics)
        self._poll = poll_interval.total_seconds()
        self._leave_timeout = leave_timeout.total_seconds()
        self._consumer = consumer
        self._application = f"pillarbox inbox {consumer}"
        self._lanes = DeliveryLanes(
            lambda lane: self._lease.use([lane]), lambda lane: self._lease.leave([lane])
        )
        server = Server()
        self._lease = Lease(
            url,
            lock_class=consumer_class(consumer),
            groups=[range(BUCKETS)],
            limit=options.lease,
            application_name=f"{self._application} lease",
            writes=OUTCOMES,
            on_take=self._lanes.take,
            on_lose=self._lanes.lose,
            on_fail=self._lease_failed,
            server=server,
        )
        self.abilities = Abilities(
            leave_out=self._leave_out,
            foreign_holders=self._foreign_holders,
            warnings=lambda: self._warnings,
            identify=self._identify,
            members=lambda: self._lease.members,
        )
        self._warnings: list[str] = []
        self._lease_failure: Exception | None = None
        self._queue = Queue(
            Link(
                url,
                application_name=self._application,
                settings=SESSION_SETTINGS,
                writes=OUTCOMES,
                server=server,
                answer_limit=answer_timeout.total_seconds(),
            ),
            self._lanes,
            consumer=consumer,
            prefetch=options.prefetch,
            sweep_interval=sweep_interval,
        )
        self._bell = Doorbell(
            url,
            lock=Lock.INBOX_DOORBELL,
            channel="inbox_message",
            application_name=f"{self._application} bell",
            server=server,
        )
        self._settled: Outcomes[Outcome] = Outcomes(self._queue.write)
        self._tasks: list[asyncio.Task[None]] = []
        self._waited_at = 0.0
        self._left_out: frozenset[str] = frozenset()

    async def __aenter__(self) -> Self:
        """Subscribe the consumer, and lease lanes.

        Raises:
            BrokerUnavailableError: the database is unreachable, or read-only.
            ConfigError: it has no table `inbox.message`, the role lacks the privileges
                to use it, or the URL leads through a pooler.
        """
        try:
            await self._enter()
        except BaseException:
            await self._lease.close()
            await self._queue.close()
            raise
        self._tasks = [
            asyncio.create_task(self._lease.run()),
            asyncio.create_task(self._settled.run()),
        ]
        return self

    async def _enter(self) -> None:
        name = without_password(self._url)
        try:
            await refuse_pooler_async(self._url)
            earlier = await self._queue.subscribe(self._topics)
            self._warnings = warn_unhandled(earlier, self._topics)
            await self._lease.beat()
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
            raise ConfigError(
                f"broker {name} has no schema inbox: run pillarbox migrate --database "
                "URL for it"
            ) from None
        except psycopg.errors.InsufficientPrivilege as error:
            raise ConfigError(
                f"broker {name}: {message_of(error)}; "
                + remedy_of(error, "grant the role pillarbox_consumer to its user")
            ) from None
        except AWAY as error:
            raise self._away(error) from error

    async def __aexit__(self, *exc_info: object) -> None:
        """Write the outcomes, then release the lanes."""
        _, writing = self._tasks
        self._settled.close()
        lanes = self._lease.lanes
        async with AsyncExitStack() as leaving:
            leaving.push_async_callback(self._queue.close)
            leaving.push_async_callback(self._bell.close)
            # A task cancelled before its first step hasn't cleaned up.
            leaving.push_async_callback(self._lease.close)
            leaving.push_async_callback(end, self._tasks)
            await asyncio.wait({writing}, timeout=self._leave_timeout)
            if writing.done() and not writing.cancelled() and self._lease.holds(lanes):
                with suppress(*AWAY, BrokerUnavailableError):
                    await self._queue.leave(lanes)

    def _leave_out(self, tenants: Collection[str]) -> None:
        self._left_out = frozenset(tenants)

    def _identify(self, id: str) -> None:
        # PostgreSQL truncates the name to 63 bytes.
        self._lease.name(" ".join(("pillarbox", id, "inbox", self._consumer, "lease")))

    def _foreign_holders(self) -> Sequence[str]:
        return tuple(map(str, self._lease.foreign))

    async def receive(self, *, limit: int) -> Sequence[Delivery]:
        """Return deliveries of leased lanes; wait for the doorbell if none is ready.

        Raises:
            BrokerUnavailableError: the database is unavailable, or foreign sessions
                hold every lane; the error names them.
        """
        for task in self._tasks:
            if task.done():
                task.result()
        foreign = self._lease.foreign
        if foreign and not self._lease.lanes:
            raise BrokerUnavailableError(
                "other sessions hold the advisory locks of this consumer's lanes:"
                f" {', '.join(map(str, foreign))}; end them, and"
                " REVOKE CONNECT ON DATABASE … FROM PUBLIC"
            )
        if self._lease_failure is not None:
            raise self._away(self._lease_failure) from self._lease_failure
        await self._settled.check()
        try:
            return await self._receive(limit)
        except AWAY as error:
            raise self._away(error) from error

    def acked(self, row: ClaimedDelivery) -> None:
        """Schedule the ack of a delivery."""
        self._settled.add(Outcome(row, None))

    def nacked(self, row: ClaimedDelivery, delay: timedelta | None) -> None:
        """Make a delivery claimable again, at once or, with its key, after a delay.

        Without the lane's lease, the delivery isn't delayed: the lane's new owner keeps
        its own record of blocked keys and would deliver later messages of the key.
        """
        if delay is None or not self._lease.holds([row.lane]):
            self._lanes.give_back(row)
            return
        self._lanes.block(row)
        self._settled.add(Outcome(row, delay))

    def handed_back(self, row: ClaimedDelivery, delay: timedelta) -> bool:
        """Let a delivery and its key wait, and others lease its lane meanwhile."""
        if self._lanes.waiting >= _MAX_WAITING:
            return False
        if self._lease.holds([row.lane]):
            self._lanes.block(row)
            self._settled.add(Outcome(row, delay, is_attempt=False))
        else:
            self._lanes.give_back(row)
        self._lease.step_aside(delay.total_seconds())
        return True

    def _lease_failed(self, error: Exception | None) -> None:
        self._lease_failure = error

    def _away(self, error: Exception) -> BrokerUnavailableError:
        reason = f"{message_of(error)}; {remedy_of(error)}"
        if not isinstance(error, DatabaseUnavailableError):
            reason = f"broker {without_password(self._url)}: {reason}"
        return BrokerUnavailableError(reason)

    async def _receive(self, limit: int) -> Sequence[Delivery]:
        # The caller may let tenants in again at any moment, but can't while this waits,
        # so return soon.
        poll = min(self._poll, _LAST_PAUSE) if self._left_out else self._poll
        deadline = time.monotonic() + jittered(poll)
        pause = _FIRST_PAUSE
        given = await self._claim(limit)
        if given and time.monotonic() - self._waited_at > _BUSY:
            # Writers needn't ring while there is work to do.
            try:
                await self._bell.disarm()
            except BaseException:
                for delivery in given:
                    await delivery.nack()
                raise
        while not given and time.monotonic() < deadline:
            armed = await self._bell.arm()
            if not armed:
                # A writer's transaction is open: its rows can appear at any moment.
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LAST_PAUSE)
            elif armed is Armed.STILL or not (given := await self._claim(limit)):
                until = min(deadline, self._queue.next_claim_at)
                await self._bell.wait(max(0.0, until - time.monotonic()))
                self._waited_at = time.monotonic()
            given = given or await self._claim(limit)
        return given

    async def _claim(self, limit: int) -> Sequence[Delivery]:
        without = self._left_out
        if not self._lanes.ready:
            await self._queue.claim(self._lease.lanes)
        await self._queue.claim_tenants(self._lease.lanes, without)
        rows = self._queue.hand_out(limit, self._lease.lanes, without)
        return [
            EntryDelivery(
                self,
                row,
                Arrived(
                    message=row.message,
                    attempts=row.attempts,
                    problem=row.problem,
                    history=self._queue.history_of(row),
                    published_at=row.created_at.timestamp(),
                ),
            )
            for row in rows
        ]
