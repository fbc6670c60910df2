"""Lanes are shared fairly; a lost session's lanes go to the remaining members."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from pillarbox import ConfigError
from pillarbox.outbox.errors import DatabaseUnavailableError
from pillarbox.outbox.lane import PRIORITIES, lanes_of
from pillarbox.outbox.postgres.advisory_lock import Lock, LockHolder
from pillarbox.outbox.postgres.connection import Connection, connect
from pillarbox.outbox.postgres.lease import Lease
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import answer_after

SECOND = timedelta(seconds=1)
GROUPS = [range(16), range(16, 32)]
CLASS = 4711


class Member:
    """A lease that records which lanes it holds."""

    def __init__(
        self,
        url: str,
        name: str,
        limit: timedelta = SECOND,
        changed: asyncio.Event | None = None,
        **options: Any,
    ) -> None:
        self.name = name
        self.held: set[int] = set()
        self.told: asyncio.Queue[Sequence[LockHolder]] = asyncio.Queue()
        self._changed = changed or asyncio.Event()
        self.lease = Lease(
            url,
            lock_class=CLASS,
            groups=GROUPS,
            limit=limit,
            application_name=name,
            on_take=self._take,
            on_lose=self._lose,
            on_obstruct=self.told.put_nowait,
            **options,
        )

    def _take(self, lanes: Collection[int]) -> None:
        assert not self.held.intersection(lanes)
        self.held.update(lanes)
        self._changed.set()

    def _lose(self, lanes: Collection[int]) -> None:
        assert self.held.issuperset(lanes)
        self.held.difference_update(lanes)
        self._changed.set()

    async def has(self, count: int) -> set[int]:
        """Wait until the member holds this many lanes, and return them."""
        async with asyncio.timeout(60):
            while len(self.held) != count:
                self._changed.clear()
                await self._changed.wait()
        return set(self.held)


@asynccontextmanager
async def member(
    url: str, name: str, changed: asyncio.Event | None = None
) -> AsyncIterator[Member]:
    joined = Member(url, name, changed=changed)
    running = asyncio.create_task(joined.lease.run())
    try:
        yield joined
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


@asynccontextmanager
async def member_with_manual_heartbeat(url: str, name: str) -> AsyncIterator[Member]:
    """A member that sends a heartbeat only on demand."""
    joined = Member(url, name)
    await joined.lease.beat()
    try:
        yield joined
    finally:
        leaving = asyncio.create_task(joined.lease.run())
        await asyncio.wait({leaving}, timeout=0)
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving


def terminate(url: str, name: str) -> None:
    execute(
        url,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE application_name = %s",
        (name,),
    )


async def test_two_replicas_share_each_group_until_one_leaves(
    database_url: str,
) -> None:
    async with member(database_url, "one") as one:
        assert await one.has(32) == set(range(32))
        assert one.lease.lanes == set(range(32))
        assert one.lease.holds(range(32))
        assert not one.lease.holds([32])
        async with member(database_url, "other") as other:
            ours, theirs = await one.has(16), await other.has(16)
            assert ours | theirs == set(range(32))
            for group in GROUPS:
                assert len(ours.intersection(group)) == 8
        assert other.held == set()
        assert other.lease.lanes == frozenset()
        await one.has(32)


async def test_more_members_than_lanes_leave_no_lane_alone(database_url: str) -> None:
    changed = asyncio.Event()
    async with AsyncExitStack() as stack:
        members = [
            await stack.enter_async_context(member(database_url, f"m{n}", changed))
            for n in range(17)
        ]
        async with asyncio.timeout(60):
            while sorted(lane for m in members for lane in m.held) != [*range(32)] or (
                max(len(m.held) for m in members) > 2
            ):
                changed.clear()
                await changed.wait()


async def test_lanes_in_use_are_not_released(database_url: str) -> None:
    async with member(database_url, "one") as one:
        await one.has(32)
        one.lease.use(range(32))
        async with member(database_url, "other") as other:
            one.lease.leave(range(4))
            theirs = await other.has(4)
            assert theirs <= set(range(16))
            # Lanes that are to be released are not claimed from.
            assert len(one.lease.lanes) < len(one.held)
            assert one.lease.holds(range(4, 32))
            one.lease.leave(range(32))
            await one.has(16)
            await other.has(16)


async def test_a_member_whose_session_ends_loses_all_lanes_and_takes_them_again(
    database_url: str,
) -> None:
    async with member(database_url, "one") as one:
        await one.has(32)
        terminate(database_url, "one")
        await one.has(0)
        assert one.lease.lanes == frozenset()
        assert not one.lease.holds([0])
        await one.has(32)


async def test_a_foreign_session_among_the_members_gets_no_share_and_is_named(
    database_url: str,
) -> None:
    execute(database_url, "DROP ROLE IF EXISTS trudy")
    execute(database_url, "CREATE ROLE trudy LOGIN")
    with psycopg.connect(database_url.replace("postgres@", "trudy@")) as session:
        session.execute(f"SELECT pg_advisory_lock_shared({CLASS}, {int(Lock.MEMBER)})")
        async with member(database_url, "one") as one, asyncio.timeout(60):
            await one.has(32)
            assert [each.role for each in await one.told.get()] == ["trudy"]
            session.close()
            assert await one.told.get() == ()
    execute(database_url, "DROP ROLE trudy")


async def test_the_server_ends_the_lease_of_a_member_without_heartbeats(
    database_url: str,
) -> None:
    async with member_with_manual_heartbeat(database_url, "frozen") as frozen:
        assert len(frozen.held) == 32

        async with member(database_url, "other") as other:
            await other.has(32)

        # It has not noticed the loss, but knows that it must not use the lanes.
        assert len(frozen.held) == 32
        assert not frozen.lease.holds([0])
        assert frozen.lease.lanes == frozenset()
        await frozen.lease.beat()
        assert frozen.lease.holds(range(32))


async def test_a_lease_expires_locally_before_the_server_ends_it(
    database_url: str,
) -> None:
    try_lane = f"SELECT pg_try_advisory_lock({CLASS}, 0)"
    async with member_with_manual_heartbeat(database_url, "frozen") as frozen:
        with psycopg.connect(database_url, autocommit=True) as watcher:
            taken = believed = False
            while not taken:
                taken = watcher.execute(try_lane).fetchone() == (True,)
                believed = frozen.lease.holds([0])
                assert not (taken and believed)


async def test_a_lease_that_has_expired_is_lost_although_its_heartbeat_succeeds(
    database_url: str,
) -> None:
    """Who has seen it expire has given up messages that it would go on without."""

    async def answer_when_it_has_expired(_: Connection) -> bool:
        while one.lease.holds([0]):
            await answer_after(0.01)
        return True

    one = Member(database_url, "one", may_hold=answer_when_it_has_expired)
    await one.lease.beat()
    assert len(one.held) == 32
    await one.lease.beat()
    assert one.held == set()
    assert not one.lease.holds([0])
    await one.lease.beat()
    assert one.lease.holds(range(32))
    await one.lease.close()


def test_a_limit_below_a_second_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lease=.*must be at least 1s"):
        Member("postgresql://unused", "short", timedelta(milliseconds=999))


def test_the_numbers_of_locks_are_unique_and_none_is_a_lane() -> None:
    # An Enum turns equal values into aliases of one member.
    values = [member.value for member in Lock.__members__.values()]
    lanes = [int(lane) for priority in PRIORITIES for lane in lanes_of(priority)]

    assert len({*values, *lanes}) == len(values) + len(lanes)


async def test_a_statement_without_an_answer_ends_its_session(
    database_url: str,
) -> None:
    async with await connect(
        database_url, application_name="test", answer_limit=0.2
    ) as connection:
        await connection.execute("SELECT 1")
        with pytest.raises(
            DatabaseUnavailableError, match=r"no answer from the database within 0\.2 s"
        ):
            await connection.execute("SELECT pg_sleep(60)")
        assert connection.closed
