"""Leases of lanes: PostgreSQL decides who may claim.

A process holds a lane by a session-level advisory lock on a connection of its own.
There is no lease table to bloat, and nothing to clean up:

    free ──take──▶ held ──release──▶ free        a member joined, or we stop
                    │
                    ├── process dies ─────────▶ free at once: the session ends
                    └── no heartbeat for `limit` ▶ free: idle_session_timeout ends it

The session runs under `idle_session_timeout`, so the *server* ends the lease of a
process that hangs or is frozen. On our side `holds` becomes false a margin before that,
counted from when the last heartbeat was sent. Each clock is compared only with itself.

Every member also holds one lock in shared mode. The number of its holders determines
the fair share of each: a member with more returns idle lanes, one with fewer takes free
lanes.

Anyone who can connect to the database can take these locks. So a session counts as a
member only if its role has the privileges of our own role; other sessions that are in
the way are reported.
"""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple

import psycopg

from pillarbox.outbox.duration import exact_duration
from pillarbox.outbox.errors import ConfigError, DatabaseUnavailableError
from pillarbox.outbox.postgres.advisory_lock import Lock, LockHolder
from pillarbox.outbox.postgres.connection import (
    Connection,
    Link,
    Server,
    check_writable,
)
from pillarbox.outbox.postgres.sql_files import load

_MARGIN: Final = 0.2
_BEATS: Final = 10
# Of the limit: within this time others have taken the lanes of one that steps aside.
_ASIDE: Final = 0.5
# The number of failed heartbeats in a row at which the failure is reported.
_FAILURES: Final = 2
RETRY: Final = 1.0
"""Maximum number of seconds between two attempts to open a session."""
_MIN_LIMIT: Final = timedelta(seconds=1)


class _Seen(NamedTuple):
    """A row of `list_lock_holders.sql`."""

    pid: int
    ours: bool
    role: str
    application: str
    client: str | None
    trusted: bool
    lanes: list[int]
    is_member: bool
    excludes: bool

    @property
    def counts(self) -> bool:
        return self.is_member and self.trusted

    @property
    def holder(self) -> LockHolder:
        return LockHolder(self.pid, self.role, self.application, self.client)


class Ownership:
    """Which lanes we hold, until when, and how many we should hold. No I/O, no clock.

    Times are seconds of one monotonic clock. `tests/models/test_lease.py` tries
    everything that can happen to two instances.

    Attributes:
        held: the lanes whose locks our session holds.
        in_use: lanes with messages in flight, which aren't given back.
        leaving: lanes that are given back as soon as they aren't in use.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._valid_until = -math.inf
        self.held: frozenset[int] = frozenset()
        self.in_use: frozenset[int] = frozenset()
        self.leaving: frozenset[int] = frozenset()

    @property
    def is_member(self) -> bool:
        """Whether our session has joined the members, as far as we know."""
        return bool(self.held) or self._valid_until != -math.inf

    def is_valid(self, now: float) -> bool:
        """Return whether the last heartbeat is recent enough to rely on the locks."""
        return now < self._valid_until

    def holds(self, lanes: Collection[int], now: float) -> bool:
        """Return whether we hold all of `lanes` at this moment."""
        return self.is_valid(now) and self.held.issuperset(lanes)

    def has_expired(self, now: float) -> bool:
        """Return whether the server has ended our session, or is about to."""
        return bool(self.held) and not self.is_valid(now)

    def renew(self, sent: float, locked: Collection[int]) -> frozenset[int]:
        """Record the answer to a heartbeat; return the lanes that were found lost.

        Args:
            sent: when it was sent, not when it was answered: the server may have
                counted from then on.
            locked: the lanes that our session had locked when it answered. The
                connection may have been reopened unnoticed.
        """
        self._valid_until = sent + self._limit * (1 - _MARGIN)
        self.leaving = frozenset()
        lost = self.held.difference(locked)
        self.held -= lost
        return lost

    def balance(
        self, group: Collection[int], members: float
    ) -> tuple[frozenset[int], int]:
        """Move towards a fair share of a group.

        Returns:
            The lanes to unlock, which no longer count as held, and the number of lanes
            to lock.
        """
        share = math.ceil(len(group) / members)
        held = self.held.intersection(group)
        # Lanes in use are given back last, and aren't claimed from until then.
        ranked = sorted(held, key=lambda lane: (lane not in self.in_use, lane))
        surplus = frozenset(ranked[share:])
        self.leaving |= surplus & self.in_use
        free = surplus - self.in_use
        self.held -= free
        return free, max(0, share - len(held))

    def take(self, lanes: Collection[int]) -> None:
        """Record lanes that our session has locked."""
        self.held = self.held.union(lanes)

    def lose_all(self) -> frozenset[int]:
        """Forget everything, since the session has ended; return the lanes it held."""
        lost, self.held = self.held, frozenset()
        self.leaving = frozenset()
        self._valid_until = -math.inf
        return lost


async def _always(_: Connection) -> bool:
    return True


class Lease:
    """The lanes that this process holds. For one event loop.

    Args:
        url: the URL of the database; the lease opens a session of its own, so no pooler
            in transaction mode may be in between.
        lock_class: the first half of the lock's key; its members share lanes.
        groups: groups of lanes; each is shared fairly.
        limit: how long a process keeps its lanes after its last heartbeat.
        writes: the tables into which members insert to settle messages. Without the
            privilege, or on a server that accepts no writes, no lane is held. Who may
            insert into the first one is trusted.
        may_hold: called before each heartbeat; while it returns False, lanes are given
            back as soon as they aren't in use, and none are taken.
        on_take, on_lose: called with lanes that were taken or lost.
        on_obstruct: called with the foreign sessions in the way when they change.
        on_fail: called with each error from the second in a row, and with None once
            heartbeats succeed again.
        server: shared with the links that read and settle the lanes' messages.

    Attributes:
        members: the application names of the members' sessions.
    """

    def __init__(
        self,
        url: str,
        *,
        lock_class: int,
        groups: Sequence[Sequence[int]],
        limit: timedelta,
        application_name: str,
        writes: Sequence[str] = ("outbox.position",),
        may_hold: Callable[[Connection], Awaitable[bool]] = _always,
        on_take: Callable[[Collection[int]], None] = lambda lanes: None,
        on_lose: Callable[[Collection[int]], None] = lambda lanes: None,
        on_obstruct: Callable[[Sequence[LockHolder]], None] = lambda foreign: None,
        on_fail: Callable[[Exception | None], None] = lambda error: None,
        server: Server | None = None,
    ) -> None:
        if limit < _MIN_LIMIT:
            raise ConfigError(
                f"lease={exact_duration(limit)}: must be at least "
                f"{exact_duration(_MIN_LIMIT)}"
            )
        self._class = lock_class
        self._groups = [list(group) for group in groups]
        self._limit = limit.total_seconds()
        self._may_hold = may_hold
        self._on_take = on_take
        self._on_lose = on_lose
        self._on_obstruct = on_obstruct
        self._on_fail = on_fail
        self._failures = 0
        self.members: Sequence[str] = ()
        self._aside_until = -math.inf
        self._writes = writes
        self._suspected: frozenset[int] = frozenset()
        self._foreign: tuple[LockHolder, ...] = ()
        self._own = Ownership(self._limit)
        self._link = Link(
            url,
            application_name=application_name,
            settings={"idle_session_timeout": str(round(self._limit * 1000))},
            server=server,
            # While the server doesn't answer, we must not rely on the lease.
            answer_limit=self._limit,
        )

    @property
    def lanes(self) -> frozenset[int]:
        """The lanes that may be claimed from: held and not about to be given back."""
        if not self._own.is_valid(time.monotonic()) or not self._link.is_open:
            return frozenset()
        return self._own.held - self._own.leaving

    def holds(self, lanes: Collection[int]) -> bool:
        """Return whether all of `lanes` are held, with a margin before the limit.

        Check before every publish: messages published without a lease may overtake
        those of another process.
        """
        return self._own.holds(lanes, time.monotonic()) and self._link.is_open

    def use(self, lanes: Collection[int]) -> None:
        """Keep lanes from being given back while their messages are in flight."""
        self._own.in_use = self._own.in_use.union(lanes)

    def leave(self, lanes: Collection[int]) -> None:
        """Record that no messages of these lanes are in flight any more."""
        self._own.in_use = self._own.in_use.difference(lanes)

    def name(self, application: str) -> None:
        """Change the application name, before the first heartbeat."""
        self._link.application_name = application

    def step_aside(self, seconds: float) -> None:
        """Let other members have all lanes for a while, as long as there is one."""
        if len(self.members) > 1:
            self._aside_until = time.monotonic() + seconds + self._limit * _ASIDE

    async def run(self) -> None:
        """Take, keep and share lanes until cancelled; then give all back.

        When the connection breaks, the lanes are lost and taken again.
        """
        try:
            while True:
                try:
                    await self.beat()
                    self._record_beat(None)
                    await self._rest()
                except (psycopg.Error, DatabaseUnavailableError) as error:
                    await self._lose_all()
                    self._record_beat(error)
                    await asyncio.sleep(random.uniform(0.1, RETRY))  # noqa: S311
        finally:
            await self._lose_all()

    def _record_beat(self, error: Exception | None) -> None:
        """Report that heartbeats fail, or succeed again.

        A failure counts from the second in a row: the first may be a lost session.
        """
        had_failed = self._failures >= _FAILURES
        self._failures = 0 if error is None else self._failures + 1
        if had_failed or self._failures >= _FAILURES:
            self._on_fail(error)

    async def close(self) -> None:
        """Give all lanes back. Only needed if `run` was never started."""
        await self._lose_all()

    async def beat(self) -> None:
        """Send one heartbeat and move towards the fair share of lanes."""
        if self._own.has_expired(time.monotonic()) or not self._link.is_open:
            await self._lose_all()
        sent = time.monotonic()
        connection = await self._link.connection()
        await check_writable(connection, self._writes)
        may_hold = await self._may_hold(connection)
        may_hold = may_hold and sent >= self._aside_until
        if not may_hold and not self._own.held:
            if self._own.is_member:
                await self._lose_all()
            elif not any(each.counts for each in await self._read_sessions(connection)):
                self._aside_until = -math.inf
            return
        joined = self._own.is_member
        if not joined:
            ((joined,),) = await self._execute(
                connection, "join_members", member=Lock.MEMBER
            )
        seen = await self._read_sessions(connection)
        self.members = [each.application for each in seen if each.counts]
        members = max(1, len(self.members))
        self._report_foreign(seen)
        if not joined:
            return
        locked = [lane for each in seen if each.ours for lane in each.lanes]
        # Then messages were given up that claims believe to be in hand.
        had_expired = self._own.has_expired(time.monotonic())
        if lost := self._own.renew(sent, locked):
            self._on_lose(lost)
        if had_expired or not self._own.is_valid(time.monotonic()):
            # The answer came too late to rely on: release the lanes for others.
            await self._lose_all()
            return
        for group in self._groups:
            await self._balance(connection, group, members if may_hold else math.inf)

    @property
    def foreign(self) -> Sequence[LockHolder]:
        """The sessions that are not members and hold a lane or keep members out."""
        return self._foreign

    async def _read_sessions(self, connection: Connection) -> list[_Seen]:
        rows = await self._execute(
            connection,
            "list_lock_holders",
            lanes=[lane for group in self._groups for lane in group],
            member=Lock.MEMBER,
            settlements=self._writes[0],
        )
        return [_Seen(*row) for row in rows]

    def _report_foreign(self, seen: Sequence[_Seen]) -> None:
        """Report the foreign sessions in the way, once they are certain."""
        foreign = {
            each.pid: each.holder
            for each in seen
            if not each.ours
            and (
                each.excludes
                or (each.is_member and not each.trusted)
                or (each.lanes and not each.counts)
            )
        }
        # Report only sessions seen twice: one that is about to end isn't in the way.
        known, self._suspected = self._suspected, frozenset(foreign)
        certain = tuple(foreign[pid] for pid in sorted(known & foreign.keys()))
        if certain != self._foreign:
            self._foreign = certain
            self._on_obstruct(certain)

    async def _rest(self) -> None:
        """Wait for the next heartbeat; raise as soon as the server ends the session.

        No notification ever arrives, but a connection that waits for one notices its
        end at once. That matters, because other processes take the lanes without delay.
        """
        if self._link.is_open:
            connection = await self._link.connection()
            async for _ in connection.notifies(timeout=self._limit / _BEATS):
                pass

    async def _balance(
        self, connection: Connection, group: Sequence[int], members: float
    ) -> None:
        free, wanted = self._own.balance(group, members)
        if free:
            # Report the loss before another process can take them.
            self._on_lose(free)
            await self._execute(connection, "release_lanes", lanes=list(free))
        elif wanted:
            offered = [lane for lane in group if lane not in self._own.held]
            # Members that start together must not all try the same lane first.
            random.shuffle(offered)
            rows = await self._execute(
                connection, "take_lanes", lanes=offered, wanted=wanted
            )
            taken = {lane for (lane,) in rows}
            if taken:
                self._own.take(taken)
                self._on_take(taken)

    async def _execute(
        self, connection: Connection, name: str, **parameters: Any
    ) -> Sequence[Any]:
        cursor = await connection.execute(
            load("outbox", name), {"class": self._class, **parameters}
        )
        return await cursor.fetchall()

    async def _lose_all(self) -> None:
        if lost := self._own.lose_all():
            self._on_lose(lost)
        await self._link.close()
