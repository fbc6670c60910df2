"""A process that reads the outbox: a relay, or a consumer without a broker.

The parts run concurrently in one event loop. `Lease` holds lanes in a session of its
own, `wake_lanes` decides when to look for messages, and `sweep_lanes` does the periodic
work. The workers, which claim and settle, are the purpose's.
"""

import asyncio
import os
import socket
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Sequence,
)
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
)
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from pillarbox.outbox.errors import (
    ConfigError,
    DatabaseUnavailableError,
    PrerequisiteError,
    message_of,
)
from pillarbox.outbox.events import Event
from pillarbox.outbox.gather import end, gather
from pillarbox.outbox.lane import PRIORITIES, lanes_of
from pillarbox.outbox.log.claim import claim_batch
from pillarbox.outbox.log.config import ReadingConfig
from pillarbox.outbox.log.events import (
    DatabaseLost,
    DatabaseRecovered,
    LanesFree,
    LanesWithheld,
    LeaseLost,
    LeaseTaken,
)
from pillarbox.outbox.log.lanes.board import LaneBoard
from pillarbox.outbox.log.registration import Registration
from pillarbox.outbox.log.settle import WRITES
from pillarbox.outbox.log.sweep import sweep_lanes
from pillarbox.outbox.log.wakeup import wake_lanes
from pillarbox.outbox.logs.printable import for_sql
from pillarbox.outbox.postgres.advisory_lock import (
    END_FOREIGN,
    Lock,
    LockHolder,
    reader_class,
)
from pillarbox.outbox.postgres.connection import (
    NOT_PREPARED,
    Connection,
    Link,
    Server,
    check_writable,
    connect,
)
from pillarbox.outbox.postgres.days import MAKE_DAYS, Days
from pillarbox.outbox.postgres.doorbell import Doorbell
from pillarbox.outbox.postgres.lease import RETRY, Lease
from pillarbox.outbox.postgres.pooler_check import refuse_pooler_async
from pillarbox.outbox.postgres.remedy import remedy_of
from pillarbox.outbox.postgres.schema_version import read_version, refuse_older
from pillarbox.outbox.url import without_password

SETTINGS: Final = {
    # If a server crash loses a settlement, its messages are published or delivered
    # again, which at-least-once delivery allows, so settling doesn't wait for the disk.
    "synchronous_commit": "off",
    # Otherwise a claim from lanes of about a thousand rows reads each lane to its end
    # and sorts it, although the index returns the rows in order: 5 ms for 500 rows
    # instead of 2. Without statistics the same happens to longer lanes.
    "enable_sort": "off",
    # Otherwise the estimates, which assume full hash tables, make the server
    # JIT-compile each claim, which takes longer than the claim itself: with 90
    # partitions, the one that checks the database at startup took 2 s.
    "jit": "off",
    # Claims have their days in their text, so that one plan serves all of a day: making
    # it takes longer than the claim. Settlements read no partition. See `NOT_PREPARED`
    # for the others.
    "plan_cache_mode": "auto",
    # Otherwise the planner compares each statement with the CHECK constraints of each
    # partition that it reads, none of which excludes a row that a claim looks for.
    # Partitions are pruned regardless.
    "constraint_exclusion": "off",
    # Not even the policies of consumers that are kept apart apply to the outbox.
    "row_security": "off",
    # A relay that hangs in a settlement would make the one that has taken over its
    # lanes wait, on the rows that both insert.
    "idle_in_transaction_session_timeout": "10s",
}
"""Those of a session that claims or settles."""
_DAYS_DELAY: Final = 1.0
"""Seconds before missing days are made, which takes longer than the first claims."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Purpose:
    """The purpose of reading the outbox: to publish messages, or to handle them.

    Attributes:
        grant: what to do if the role lacks a right; `{}` is for its quoted name.
        enter: begins, and adds to the stack what to leave at the end.
        started: called when the database and all else was reached.
        workers: what claims and settles; each is in `in_flight` while it must end.
        tasks: what to run until all workers have ended.
        recorded: records the process in the database for a block.
    """

    grant: str
    enter: Callable[[AsyncExitStack, Connection], Awaitable[None]]
    started: Callable[[], None]
    workers: Callable[[], Iterable[Coroutine[Any, Any, None]]]
    tasks: Callable[[], Iterable[Coroutine[Any, Any, None]]] = tuple
    recorded: Callable[[], AbstractAsyncContextManager[object]] = nullcontext


class ReadingProcess:
    """Leases lanes and wakes, sweeps and drains the workers. For one event loop.

    Args:
        url: the database's URL, for a direct connection, not a transaction pooler.
        registration: the reader.
        kind: what it is, in the names of its sessions.
        links: how many connections the workers have besides that of the sweep.

    Attributes:
        application: the beginning of the names of its sessions.
        stopping: set when no new messages may be claimed.
        in_flight: the workers that have messages in hand.
    """

    def __init__(
        self,
        url: str,
        registration: Registration,
        config: ReadingConfig,
        notify: Callable[[Event], None],
        *,
        kind: str,
        links: int = 0,
    ) -> None:
        # Short, because PostgreSQL truncates it to 63 bytes and the part comes last.
        host = socket.gethostname()[:30]
        self.application = f"pillarbox {kind} {host} {os.getpid()}"
        self.server = Server()
        self.stopping = asyncio.Event()
        self.in_flight: set[asyncio.Task[Any]] = set()
        self._url = url
        self._registration = registration
        self._config = config
        self._notify = notify
        self._lease = Lease(
            url,
            lock_class=reader_class(registration.name),
            groups=[lanes_of(priority) for priority in PRIORITIES],
            limit=config.lease,
            application_name=f"{self.application} lease",
            writes=WRITES,
            may_hold=registration.may_read,
            on_obstruct=self._on_obstruct,
            on_take=self._on_take,
            on_lose=self._on_lose,
            on_fail=self._on_fail,
            server=self.server,
        )
        self.lanes = LaneBoard(self._lease, config.concurrency, registration.name)
        registration.on_topics = self.lanes.take_over
        self.shared_link = self._link("shared")
        self.links = [self._link("worker") for _ in range(links)]
        self._days = Days(self._make_days, notify)

    @property
    def members(self) -> Sequence[str]:
        """The names of the sessions of this reader's processes."""
        return self._lease.members

    def identify(self, id: str) -> None:
        """Name the session of the lease after an id, before it runs: see `members`."""
        # PostgreSQL truncates the name to 63 bytes.
        name = self._registration.name
        self._lease.name(" ".join(("pillarbox", id, "inbox", name, "lease")))

    def step_aside(self, seconds: float) -> None:
        """Let other processes of the reader, if there are any, have all lanes."""
        self._lease.step_aside(seconds)

    async def run(self, purpose: Purpose) -> None:
        """Read until `stopping` is set, then drain and release the lanes.

        Broken connections are replaced.

        Raises:
            ConfigError: the schema or a privilege is missing, or the URL leads through
                a transaction pooler. Raised only at the start, like the next one.
            DatabaseUnavailableError: the database is unreachable or read-only.
        """
        async with AsyncExitStack() as stack:
            async with self._checked(purpose) as connection:
                await purpose.enter(stack, connection)
                record = await self._registration.read(connection)
                self.lanes.reader.takeover.since = record.since
                self.lanes.gets_all = record.gets_all
                await self._registration.may_read(connection)
                links = (self.shared_link, *self.links)
                for link in links:
                    stack.push_async_callback(link.close)
                # One that is opened later makes all claims start over. If that came
                # between a takeover and its claim, it would read settled messages.
                await gather(link.connection() for link in links)
                self.lanes.opened(max(link.opened_at for link in links), ())
            purpose.started()
            async with asyncio.TaskGroup() as group:
                sweep = sweep_lanes(
                    self.lanes, self.shared_link, self._config, self._notify
                )
                parts = (self._lease.run(), self._wake(), sweep, self._keep_days())
                upkeep = [group.create_task(it) for it in (*parts, *purpose.tasks())]
                workers = [group.create_task(it) for it in purpose.workers()]
                async with purpose.recorded():
                    await self.stopping.wait()
                    await self._drain(workers)
                await end(upkeep)

    @asynccontextmanager
    async def _checked(self, purpose: Purpose) -> AsyncIterator[Connection]:
        await refuse_pooler_async(self._url)
        try:
            async with await connect(
                self._url,
                application_name=self.application,
                settings=SETTINGS,
            ) as connection:
                version = await read_version(connection)
                await check_writable(connection, WRITES)
                refuse_older(version)
                await self._registration.prepare(connection)
                takeover = self.lanes.reader.takeover
                now = (await takeover.read_clock(connection)).now
                await takeover.read_days(connection, [], now)
                await claim_batch(connection, self.lanes, [], self._config)
                yield connection
        except (
            psycopg.errors.UndefinedTable,
            psycopg.errors.UndefinedFunction,
            psycopg.errors.InvalidSchemaName,
        ) as error:
            raise PrerequisiteError(
                "the database has no schema outbox: run pillarbox migrate"
            ) from error
        except psycopg.errors.InsufficientPrivilege as error:
            grant = purpose.grant.format(for_sql(await self._role()))
            raise ConfigError(
                f"{message_of(error)}: {remedy_of(error, grant)}"
            ) from error
        except psycopg.errors.ReadOnlySqlTransaction as error:
            raise DatabaseUnavailableError(
                f"can't record the outcome of messages: {message_of(error)}"
            ) from error
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            raise DatabaseUnavailableError(
                f"database {without_password(self._url)}: {message_of(error)}"
            ) from error

    async def _role(self) -> str:
        name = self.application
        async with await connect(self._url, application_name=name) as connection:
            cursor = await connection.execute("SELECT current_user")
            ((role,),) = await cursor.fetchall()
            return str(role)

    async def _wake(self) -> None:
        doorbell = Doorbell(
            self._url,
            lock=Lock.OUTBOX_DOORBELL,
            channel="outbox_message",
            application_name=f"{self.application} doorbell",
            server=self.server,
        )
        interval = self._config.poll_interval.total_seconds()
        await wake_lanes(self.lanes, doorbell, interval)

    async def _keep_days(self) -> None:
        await asyncio.sleep(_DAYS_DELAY)
        await self._days.make()
        await self._days.keep()

    async def _make_days(self) -> list[Any]:
        name = f"{self.application} days"
        async with await connect(self._url, application_name=name) as connection:
            return await (await connection.execute(MAKE_DAYS)).fetchall()

    def _link(self, part: str) -> Link:
        return Link(
            self._url,
            application_name=f"{self.application} {part}",
            settings=SETTINGS,
            writes=WRITES,
            server=self.server,
            prepare_threshold=NOT_PREPARED,
        )

    async def _drain(self, workers: Collection[asyncio.Task[None]]) -> None:
        """Give batches in flight time to finish, and start no new ones."""
        in_flight = [task for task in workers if task in self.in_flight]
        for task in set(workers).difference(in_flight):
            task.cancel()
        if in_flight:
            await asyncio.wait(in_flight, timeout=self._config.drain.total_seconds())
        for task in in_flight:
            task.cancel()

    def _on_take(self, lanes: Collection[int]) -> None:
        self.lanes.take(lanes)
        self._notify(LeaseTaken(lanes=tuple(sorted(lanes))))

    def _on_obstruct(self, foreign: Sequence[LockHolder]) -> None:
        if foreign:
            holders = tuple(map(str, foreign))
            self._notify(LanesWithheld(holders=holders, remedy=END_FOREIGN))
        else:
            self._notify(LanesFree())

    def _on_fail(self, error: Exception | None) -> None:
        self._notify(
            DatabaseRecovered() if error is None else DatabaseLost.of(error, RETRY)
        )

    def _on_lose(self, lanes: Collection[int]) -> None:
        self.lanes.lose(lanes)
        self._notify(LeaseLost(lanes=tuple(sorted(lanes))))
