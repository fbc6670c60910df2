"""Measure backlogs, failures and connected processes from the database.

No single process sees all of this. `pillarbox status`, the page and the metrics share
this reader. Its cost depends on what waits, not on what is kept: it starts at the
watermarks, counts up to a limit, and reads no payloads. Members of `pillarbox_monitor`
can read all of it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from itertools import groupby
from typing import Any, Final, Literal, LiteralString, TypeAlias, TypeVar

import psycopg
from psycopg import sql
from psycopg.rows import class_row, dict_row

from outbox.administration.check import Finding, Severity
from outbox.administration.checks.broker import read_broker
from outbox.administration.checks.locks import read_consumers
from outbox.administration.checks.sessions import sees_all_sessions
from outbox.administration.checks.upkeep import (
    Upkeep,
    is_standby,
    read_upkeep,
)
from outbox.administration.connection import AdministrationConnection
from outbox.administration.sides import Blocked, BlockedCount, Side, load_sides
from outbox.dead_letters.statement import Schema
from outbox.duration import exact_duration, write_duration
from outbox.errors import UpkeepError, message_of
from outbox.lane import LANES
from outbox.logs.printable import count
from outbox.postgres.advisory_lock import LOCK_CLASS, consumer_class
from outbox.postgres.remedy import remedy_of
from outbox.postgres.sql_files import load

_RELAY: Final = "pillarbox relay "
_CONSUMER: Final = "pillarbox inbox "
_PARTS_OF_A_PROCESS: Final = (
    "lease",
    "sweep",
    "oversized",
    "doorbell",
    "worker",
    "bell",
)
_MAX_NAME: Final = 63
"""PostgreSQL truncates an application_name to this many bytes."""

_RECENT: Final = timedelta(days=1)
_WAITING: Final = timedelta(minutes=1)
_LATE: Final = timedelta(minutes=15)
_FEW_AHEAD: Final = 3
"""Fewer are an error; a premake of 3 leaves 2 from midnight to the next upkeep."""
_LONG_PIN: Final = timedelta(hours=1)
_DEFERRED_SHARE: Final = 4
_MOST_BLOCKED: Final = 20

Part: TypeAlias = Literal[
    "backlogs",
    "rate",
    "processes",
    "consumers",
    "blocked",
    "dead_letters",
    "jobs",
    "tables",
    "upkeep",
    "pins",
]
PARTS: Final[Sequence[Part]] = (
    "backlogs",
    "rate",
    "processes",
    "consumers",
    "blocked",
    "dead_letters",
    "jobs",
    "tables",
    "upkeep",
    "pins",
)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What to measure, and how much of it.

    Attributes:
        parts: the parts to measure; the others are empty.
        window: the window of the rates and latencies.
        letters_window: the window in which a dead letter counts as new.
        per_lane: the most messages counted in a lane.
        rows: the most dead letters, jobs and receipts counted.
        marks: the most marks per lane from which the rate is measured.
        groups: the most topics, tenants and reasons listed, largest first.
        sizes: whether to add up the bytes of the tables, which checks every file.
        pins_from: how long a transaction must have been open to be listed.
        pins_behind: how many transactions one must lie behind to be listed, if this
            role can't see how long it has been open.
        patience: how long a part can take; if it takes longer, it is missing.
    """

    parts: Collection[Part] = PARTS
    window: timedelta = timedelta(minutes=5)
    letters_window: timedelta = timedelta(hours=24)
    per_lane: int = 500
    rows: int = 10_000
    marks: int = 20
    groups: int = 10
    sizes: bool = False
    pins_from: timedelta = timedelta(minutes=1)
    pins_behind: int = 1_000_000
    patience: timedelta = timedelta(seconds=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class BacklogGroup:
    """The messages of a backlog that share a priority, a topic or a tenant.

    Attributes:
        name: the value they share; None for messages without a tenant.
        waited: how long the oldest due message has waited; None if none is due.
    """

    name: str | None
    messages: int
    waited: timedelta | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """Unsettled messages of the outbox, or unsettled deliveries of a consumer.

    Attributes:
        messages: the number counted; if `is_complete`, all of them.
        is_complete: whether the count ended before its limit; if not, there are more
            than were counted, in the groups as well.
        estimated: the approximate number; if `is_complete`, the number counted; None if
            only the number counted is known.
        ready: how many of those counted are due.
        scheduled: how many are not due yet.
        refused: how many were refused and will be tried again.
        blocked: how many wait behind another one of their key.
        waited: how long the oldest due one has waited; None if none is due.
        tenants: the tenants; empty if no message has one.
    """

    messages: int
    is_complete: bool
    estimated: int | None
    ready: int
    scheduled: int
    refused: int
    blocked: int
    waited: timedelta | None
    priorities: tuple[BacklogGroup, ...] = ()
    topics: tuple[BacklogGroup, ...] = ()
    tenants: tuple[BacklogGroup, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How fast messages were published or handled in the last minutes.

    Attributes:
        per_second: messages per second; 0 if there were none.
        dead_lettered: dead letters per second; None if they aren't measured.
        median: the median of the time since a message was added; None if no such time
            is known.
        slow: the 95th percentile of that time.
    """

    window: timedelta
    per_second: float
    dead_lettered: float | None
    median: timedelta | None
    slow: timedelta | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A pillarbox process, as its sessions show it.

    Attributes:
        kind: relay, consumer (of the postgres broker) or command.
        name: a relay's host and process, or a consumer's name.
        replicas: how many hold or wait for lanes.
        since: when its first session began; None if this role can't see that.
    """

    kind: str
    name: str
    replicas: int
    sessions: int
    roles: str
    clients: str
    since: datetime | None
    lanes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """The connected processes, and the lanes that no relay holds.

    Attributes:
        lanes: the number of lanes of the outbox.
        free: lanes that no relay holds.
        sees_all: whether this role can see when other roles' sessions began.
        role: the name of this role, as written in SQL.
        broker: where relays publish, without credentials; None before the first relay.
    """

    relays: tuple[Process, ...]
    consumers: tuple[Process, ...]
    commands: tuple[Process, ...]
    lanes: int
    free: tuple[int, ...]
    sees_all: bool
    role: str
    broker: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerStatus:
    """A consumer that has subscribed, has recently handled messages, or is connected.

    Attributes:
        is_subscribed: whether it has subscribed to topics of the postgres broker. Only
            for that broker does the database show what waits and who is connected;
            other brokers keep that themselves.
        replicas: how many are connected; None if it uses another broker.
        lag: its deliveries that are not acked; None if it uses another broker.
        rate: how fast it handled the messages that were added within the window.
    """

    name: str
    is_subscribed: bool
    replicas: int | None
    lag: Backlog | None
    rate: Rate | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedSummary:
    """Messages that were refused and wait for their next attempt.

    Attributes:
        keys: how many keys these messages block.
        without_key: how many of the messages block no key.
        oldest: the oldest of the messages, oldest first, 20 at most.
    """

    side: Schema
    keys: int
    without_key: int
    oldest: tuple[Blocked, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Pending dead letters that failed for the same reason.

    Attributes:
        reason: the first 80 characters of the reason.
        new: how many were dead-lettered within the window.
        topic: one of their topics.
        age: the age of the oldest one.
    """

    reason: str
    origin: str
    pending: int
    new: int
    topics: int
    topic: str
    age: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetters:
    """The pending dead letters of one side.

    Attributes:
        pending: how many were counted, not only within the window; if `is_complete`,
            all of them.
        new: how many of them were dead-lettered within the window.
        is_complete: whether the count ended before its limit; if not, the newest ones
            were counted, and there are more.
        age: the age of the oldest one; None if there is none.
        reasons: the reasons, most frequent first.
    """

    side: Schema
    window: timedelta
    pending: int
    new: int
    is_complete: bool
    age: timedelta | None
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenJobs:
    """The jobs of a consumer that have not ended.

    Attributes:
        cancelling: how many were asked to stop and have not ended yet.
        abandoned: how many are running or cancelling, but their worker's lease expired.
        queued_for: the longest time in the queue; None if none is queued.
        running_for: the longest running time; None if none is running.
        is_complete: whether the count ended before its limit.
    """

    consumer: str
    queued: int
    running: int
    cancelling: int
    abandoned: int
    queued_for: timedelta | None
    running_for: timedelta | None
    is_complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPartition:
    """A partition past its retention that has not been dropped.

    Attributes:
        overdue: how long it has been past its retention.
        unsettled: how many rows hold it, counted up to 1,000; None if not counted.
        reason: why it is held, without values from rows.
    """

    partition: str
    starts_at: datetime
    ends_at: datetime
    overdue: timedelta
    unsettled: int | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The partitions of a table.

    Attributes:
        follows: the table whose partitions it follows; None if it has its own.
        oldest: when the first partition begins; None if there is none.
        ahead: how many partitions have not begun yet.
        has_today: whether current rows have a partition; if not, they are rejected.
        gaps: how many partitions are missing between future ones.
        held: partitions past their retention that unsettled rows hold, oldest first.
        expired: how many partitions are past their retention, for any reason.
        bytes: the size of all partitions with their indexes; None if not requested.
    """

    table: str
    follows: str | None
    span: timedelta
    retention: timedelta
    premake: int
    partitions: int
    oldest: datetime | None
    ahead: int
    has_today: bool
    gaps: int
    expired: int
    held: tuple[HeldPartition, ...]
    bytes: int | None

    @property
    def days_ahead(self) -> float:
        """How many days the partitions after the current one cover."""
        return self.ahead * self.span / timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Something that keeps an old snapshot or transaction in use.

    Until it ends, partitions can't be detached, and dead rows can't be removed. A
    transaction that writes also keeps relays from forgetting what they have claimed
    since it began.

    Attributes:
        kind: session, prepared transaction, replication slot or standby.
        name: the name of the application, the transaction or the slot.
        open_for: how long it has been open; None if this role can't see that, or it
            isn't a transaction.
        xid: the oldest transaction that it needs; None if it needs none.
        xids: how many transactions it lies behind; None if it needs none.
    """

    kind: str
    name: str | None
    pid: int | None
    role: str | None
    state: str | None
    open_for: timedelta | None
    is_writing: bool
    xid: str | None
    xids: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A part that couldn't be measured."""

    part: Part
    reason: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The state of messages, processes and partitions, as the database shows it.

    A part that wasn't requested, or that is missing, is None or empty.

    Attributes:
        at: the time of the measurement, by the server's clock.
        is_standby: whether this server is a standby, which doesn't show who is
            connected to its primary.
        findings: problems and their remedies, worst first; empty if all is well.
        outbox: the unsettled messages.
        rate: how fast messages were published.
        jobs: the open jobs of each consumer that has any.
        pins: what keeps old snapshots or transactions in use, longest first.
        missing: the parts that couldn't be measured, and why.
    """

    at: datetime
    database: str
    is_standby: bool
    findings: tuple[Finding, ...]
    outbox: Backlog | None
    rate: Rate | None
    processes: Processes | None
    consumers: tuple[ConsumerStatus, ...]
    blocked: tuple[BlockedSummary, ...]
    dead_letters: tuple[DeadLetters, ...]
    jobs: tuple[OpenJobs, ...]
    tables: tuple[Table, ...]
    upkeep: Upkeep | None
    pins: tuple[Pin, ...]
    missing: tuple[Missing, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Counts for each of the last minutes, oldest first.

    If a minute has many rows, its count is extrapolated from the rate of the first
    ones.

    Attributes:
        until: when the last minute ended, by the server's clock.
        added: messages that were added, by the moment in their id.
        published: messages that were published, of those added in the last 25 hours.
        handled: messages with a receipt, by consumer, in the minute in which they were
            added.
        given_up: dead letters, by side.
    """

    until: datetime
    added: tuple[float, ...]
    published: tuple[float, ...]
    handled: Mapping[str, tuple[float, ...]]
    given_up: Mapping[Schema, tuple[float, ...]]


def read_history(
    connection: AdministrationConnection, minutes: int = 60, *, most: int = 200
) -> History:
    """Count messages and dead letters in each of the last full minutes.

    Args:
        most: the most rows counted per minute.

    Raises:
        psycopg.Error: the history can't be read, for example for lack of a privilege.
    """
    found: dict[tuple[str, str | None], list[float]] = {}
    with connection.transaction():
        _limit(connection, Scope().patience)
        until = read_minute(connection)
        rows = connection.execute(
            load("outbox", "measure_history"), {"minutes": minutes, "most": most}
        )
        for series, name, minute, messages in rows:
            of_series = found.setdefault((series, name), [0.0] * minutes)
            of_series[minutes - 1 - minute] = messages
    nothing = [0.0] * minutes
    schemas: tuple[Schema, ...] = ("outbox", "inbox")
    return History(
        until=until,
        added=tuple(found.get(("added", None), nothing)),
        published=tuple(found.get(("published", None), nothing)),
        handled={
            name: tuple(messages)
            for (series, name), messages in found.items()
            if series == "handled" and name is not None
        },
        given_up={
            side: tuple(found.get(("given_up", side), nothing)) for side in schemas
        },
    )


def read_minute(connection: AdministrationConnection) -> datetime:
    """Return the start of the current minute, where a history ends."""
    ((began,),) = connection.execute(load("outbox", "find_minute")).fetchall()
    assert isinstance(began, datetime)
    return began


def _limit(
    connection: AdministrationConnection,
    patience: timedelta,
    *,
    reads_log: bool = False,
) -> None:
    milliseconds = int(patience.total_seconds() * 1000)
    connection.execute(
        load("outbox", "limit_reading"),
        {"patience": f"{milliseconds}ms", "seqscan": "on" if reads_log else "off"},
    )


def read_overview(
    connection: AdministrationConnection, scope: Scope | None = None
) -> Overview:
    """Measure the parts of a scope, in autocommit mode or in a transaction.

    For one thread. A part that fails, for example for lack of a privilege, is missing;
    the others are still measured.

    Raises:
        psycopg.Error: the connection was lost.
        UpkeepError: the database has no pillarbox schema.
    """
    reading = _Reading(connection, scope or Scope())
    return reading.run()


class _Reading:
    """One measurement."""

    def __init__(self, connection: AdministrationConnection, scope: Scope) -> None:
        self._connection = connection
        self._scope = scope
        self._missing: list[Missing] = []

    def run(self) -> Overview:
        row = self._connection.execute(load("outbox", "look_around")).fetchone()
        assert row is not None
        at, database, has_schema = row
        self._at = at.astimezone(UTC)
        if not has_schema:
            raise UpkeepError(
                "this database has no table outbox.message; run pillarbox migrate"
            )
        processes = self._part("processes", partial(read_processes, self._connection))
        free = range(LANES) if processes is None else processes.free
        backlog = self._part(
            "backlogs", partial(self._read_backlog, {*range(LANES)} - {*free})
        )
        consumers = self._part("consumers", partial(self._read_consumers, processes))
        refused: Mapping[Schema, int | None] = {
            "outbox": _count_refused([backlog]),
            "inbox": None
            if consumers is None
            else _count_refused([it.lag for it in consumers if it.is_subscribed]),
        }
        measured: dict[str, Any] = {
            "outbox": backlog,
            "rate": self._part("rate", partial(self._read_rate, backlog)),
            "consumers": consumers or (),
            "blocked": self._sides("blocked", partial(self._read_blocked, refused)),
            "dead_letters": self._sides("dead_letters", self._read_dead_letters),
            "jobs": self._part("jobs", self._read_jobs) or (),
            "tables": self._part("tables", self._read_tables) or (),
            "upkeep": self._part("upkeep", partial(read_upkeep, self._connection)),
            "pins": self._part("pins", self._read_pins) or (),
        }
        found = Overview(
            at=self._at,
            database=database,
            is_standby=is_standby(self._connection),
            findings=(),
            processes=processes,
            missing=tuple(self._missing),
            **measured,
        )
        order = list(Severity)
        return replace(
            found,
            findings=tuple(
                sorted(_judge(found), key=lambda it: order.index(it.severity))
            ),
        )

    def _part(self, name: Part, read: Callable[[], T]) -> T | None:
        if name not in self._scope.parts:
            return None
        try:
            with self._connection.transaction():
                reads_log = name == "blocked"
                _limit(self._connection, self._scope.patience, reads_log=reads_log)
                return read()
        except psycopg.errors.QueryCanceled:
            reason = f"it took longer than {write_duration(self._scope.patience)}"
            remedy = "wait until the server is less busy, or run pillarbox doctor"
        except psycopg.errors.InsufficientPrivilege as error:
            reason = f"this role lacks privileges: {error.diag.message_primary}"
            remedy = remedy_of(error, "connect as a member of pillarbox_monitor")
        except (
            psycopg.errors.UndefinedTable,
            psycopg.errors.UndefinedFunction,
            psycopg.errors.UndefinedColumn,
            psycopg.errors.InvalidSchemaName,
        ) as error:
            reason = f"part of the schema is missing: {error.diag.message_primary}"
            remedy = "run pillarbox migrate"
        except psycopg.Error as error:
            if error.sqlstate is None or self._connection.closed:
                raise
            reason, remedy = message_of(error), "run pillarbox doctor"
        self._missing.append(Missing(part=name, reason=reason, remedy=remedy))
        return None

    def _sides(self, name: Part, read: Callable[[Side], T]) -> tuple[T, ...]:
        if name not in self._scope.parts:
            return ()
        found = (self._part(name, partial(read, side)) for side in load_sides(None))
        return tuple(it for it in found if it is not None)

    def _rows(self, statement: LiteralString, **values: object) -> list[dict[str, Any]]:
        with self._connection.cursor(row_factory=dict_row) as cursor:
            return cursor.execute(statement, values or None).fetchall()

    def _read_backlog(self, held: Collection[int]) -> Backlog:
        tally = _Tally()
        for since, lanes in self._find_unverified(held):
            if lanes:
                for row in self._rows(
                    load("outbox", "count_unmarked"),
                    lanes=[it["lane"] for it in lanes],
                    verified=[_or_first(it["verified_up_to"]) for it in lanes],
                    marked=[_or_first(it["marked_up_to"]) for it in lanes],
                    since=since,
                    most=self._scope.per_lane,
                ):
                    tally.add(row)
        most = self._scope.per_lane * _DEFERRED_SHARE
        _limit(self._connection, self._scope.patience, reads_log=True)
        entries = self._rows(load("outbox", "list_deferred"), most=most)
        _limit(self._connection, self._scope.patience)
        if entries:
            if len(entries) > most:
                tally.add({"part": "total", "name": None, "oldest": None, "more": 1})
            moments = [it["created_at"] for it in entries]
            for row in self._rows(
                load("outbox", "count_deferred"),
                ids=[it["id"] for it in entries],
                moments=moments,
                seqs=[it["seq"] for it in entries],
                lanes=[it["lane"] for it in entries],
                runs=[it["run"] for it in entries],
                causes=[it["cause"] for it in entries],
                dues=[it["due_at"] for it in entries],
                first=min(moments),
                last=max(moments),
            ):
                tally.add(row)
        return tally.sum(self._scope.groups, self._at)

    def _find_unverified(
        self, held: Collection[int]
    ) -> Iterator[tuple[datetime, list[dict[str, Any]]]]:
        """Yield the day from which to count, and lanes with their watermarks.

        Opening all days takes much longer than looking for messages, so only recent
        days are opened if that is enough. A watermark of recent days holds for all
        earlier days. A lane with neither a watermark nor a message in recent days has
        nothing to count before them either, if a relay holds the lane and verifies
        other lanes.
        """
        since = self._recent
        lanes = self._read_progress(since)
        verified = [it for it in lanes if it["verified_up_to"] is not None]
        idle = [
            it
            for it in lanes
            if it["verified_up_to"] is None
            and not it["has_messages"]
            and it["lane"] in held
            and verified
        ]
        yield since, verified
        others = [it["lane"] for it in lanes if it not in verified and it not in idle]
        if others:
            everything = datetime.min.replace(tzinfo=UTC)
            lanes = self._read_progress(everything)
            yield everything, [it for it in lanes if it["lane"] in others]

    def _read_progress(self, since: datetime) -> list[dict[str, Any]]:
        return self._rows(load("outbox", "read_progress"), since=since)

    @cached_property
    def _recent(self) -> datetime:
        """The start of the partition that holds the messages of a day ago."""
        since = self._at - _RECENT
        (row,) = self._rows(load("outbox", "find_recent_days"), since=since)
        starts_at: datetime | None = row["starts_at"]
        return since if starts_at is None else starts_at

    def _read_rate(self, backlog: Backlog | None) -> Rate:
        since = self._recent
        if backlog is not None and backlog.waited is not None:
            since = min(since, self._at - backlog.waited - _RECENT)
        (row,) = self._rows(
            load("outbox", "measure_rate"),
            window=self._scope.window,
            since=since,
            most=self._scope.marks,
        )
        return Rate(
            window=self._scope.window,
            per_second=row["published"] or 0.0,
            dead_lettered=row["dead_lettered"] or 0.0,
            median=row["median"],
            slow=row["slow"],
        )

    def _read_consumers(
        self, processes: Processes | None
    ) -> tuple[ConsumerStatus, ...]:
        scope = self._scope
        subscribed = read_consumers(self._connection)
        rates = {
            row["consumer"]: Rate(
                window=scope.window,
                per_second=row["handled"],
                dead_lettered=None,
                median=row["median"],
                slow=row["slow"],
            )
            for row in self._rows(
                load("outbox", "measure_handling"),
                since=self._at - scope.window,
                until=self._at,
                most=scope.rows,
            )
        }
        lags = self._read_lags()
        connected: Mapping[str, int] = {}
        if processes is not None:
            connected = {it.name: it.replicas for it in processes.consumers}
        found = []
        for name in sorted({*subscribed, *rates, *lags}):
            is_subscribed = name in subscribed or name in lags
            found.append(
                ConsumerStatus(
                    name=name,
                    is_subscribed=is_subscribed,
                    replicas=_replicas(connected, name)
                    if is_subscribed and processes is not None
                    else None,
                    lag=lags.get(name, _NOTHING) if is_subscribed else None,
                    rate=rates.get(name),
                )
            )
        return tuple(found)

    def _read_lags(self) -> dict[str, Backlog]:
        # Planning the count takes a fifth of a new session's total time.
        used = self._connection.execute(load("outbox", "find_deliveries")).fetchone()
        if used == (False,):
            return {}
        rows = self._rows(load("outbox", "count_deliveries"), most=self._scope.per_lane)
        lags = {}
        for consumer, of_consumer in groupby(rows, lambda row: str(row["consumer"])):
            total, *topics = of_consumer
            lags[consumer] = Backlog(
                messages=total["messages"],
                is_complete=not total["more"],
                estimated=None if total["more"] else total["messages"],
                ready=total["ready"],
                scheduled=0,
                refused=total["waiting"],
                blocked=total["blocked"],
                waited=total["waited"],
                topics=tuple(
                    BacklogGroup(
                        name=row["topic"],
                        messages=row["messages"],
                        waited=row["waited"],
                    )
                    for row in topics[: self._scope.groups]
                ),
            )
        return lags

    def _read_blocked(
        self, refused: Mapping[Schema, int | None], side: Side
    ) -> BlockedSummary:
        # Skipped if no message was counted as refused, since reading the log again
        # takes time.
        counted = BlockedCount(0, 0)
        oldest: Sequence[Blocked] = ()
        if refused[side.schema] != 0:
            counted = side.read_blocked_count(self._connection)
        if counted.keys or counted.without_key:
            oldest = side.read_blocked(self._connection, _MOST_BLOCKED)
        return BlockedSummary(
            side=side.schema,
            keys=counted.keys,
            without_key=counted.without_key,
            oldest=tuple(oldest),
        )

    def _read_dead_letters(self, side: Side) -> DeadLetters:
        scope = self._scope
        rows = self._rows(
            load("outbox", "count_dead_letters").replace("{schema}", side.schema),
            window=scope.letters_window,
            most=scope.rows,
        )
        counted = rows[0]["counted"] if rows else 0
        return DeadLetters(
            side=side.schema,
            window=scope.letters_window,
            pending=min(counted, scope.rows),
            new=min(sum(row["new"] for row in rows), scope.rows),
            is_complete=counted <= scope.rows,
            age=rows[0]["age_of_all"] if rows else None,
            reasons=tuple(
                Reason(**{name: row[name] for name in Reason.__slots__})
                for row in rows[: scope.groups]
            ),
        )

    def _read_jobs(self) -> tuple[OpenJobs, ...]:
        with self._connection.cursor(row_factory=class_row(OpenJobs)) as cursor:
            cursor.execute(load("outbox", "count_jobs"), {"most": self._scope.rows})
            return tuple(cursor.fetchall())

    def _read_tables(self) -> tuple[Table, ...]:
        expired: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in self._rows(load("outbox", "list_expired")):
            expired[row.pop("parent_table")].append(row)
        sizes: dict[str, int] = {}
        if self._scope.sizes:
            rows = self._connection.execute(load("outbox", "measure_sizes"))
            sizes = dict(rows.fetchall())
        return tuple(
            Table(
                table=row.pop("parent_table"),
                expired=len(expired[table]),
                held=tuple(self._find_held(table, expired[table])),
                bytes=sizes.get(table, 0) if self._scope.sizes else None,
                **row,
            )
            for row in self._rows(load("outbox", "read_partition_health"))
            for table in [row["parent_table"]]
        )

    def _find_held(
        self, table: str, expired: Sequence[Mapping[str, Any]]
    ) -> Iterator[HeldPartition]:
        if not expired:
            return
        overdue = {row["partition"]: row["overdue"] for row in expired}
        try:
            with self._connection.transaction():
                held = self._rows(load("outbox", "list_held"), table=table)
        except (
            psycopg.errors.QueryCanceled,
            psycopg.errors.InsufficientPrivilege,
        ) as error:
            reason = f"unknown: {error.diag.message_primary}"
            held = [{**row, "unsettled": None, "reason": reason} for row in expired]
        for row in held:
            yield HeldPartition(
                partition=row["partition"],
                starts_at=row["starts_at"],
                ends_at=row["ends_at"],
                overdue=overdue.get(row["partition"], timedelta(0)),
                unsettled=row["unsettled"],
                reason=row["reason"],
            )

    def _read_pins(self) -> tuple[Pin, ...]:
        with self._connection.cursor(row_factory=class_row(Pin)) as cursor:
            cursor.execute(
                load("outbox", "list_pins"),
                {"at_least": self._scope.pins_from, "xids": self._scope.pins_behind},
            )
            return tuple(cursor.fetchall())


class _Tally:
    """Adds up the counts of several statements."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[str | None, Counter[str]]] = defaultdict(
            lambda: defaultdict(Counter)
        )
        self._oldest: dict[tuple[str, str | None], datetime] = {}

    def add(self, row: dict[str, Any]) -> None:
        part, name, oldest = (row.pop(it) for it in ("part", "name", "oldest"))
        self._parts[part][name].update(row)
        if oldest is not None:
            place = part, name
            self._oldest[place] = min(oldest, self._oldest.get(place, oldest))

    def sum(self, most: int, now: datetime) -> Backlog:
        total = self._parts["total"][None]
        return Backlog(
            messages=total["messages"],
            is_complete=not total["more"],
            estimated=total["estimated"],
            ready=total["ready"],
            scheduled=total["scheduled"],
            refused=total["waiting"],
            blocked=total["blocked"],
            waited=self._waited("total", None, now),
            priorities=self._groups("priority", most, now),
            topics=self._groups("topic", most, now),
            tenants=self._groups("tenant", most, now)
            if any(name is not None for name in self._parts["tenant"])
            else (),
        )

    def _groups(self, part: str, most: int, now: datetime) -> tuple[BacklogGroup, ...]:
        groups = sorted(
            self._parts[part].items(),
            key=lambda it: (-it[1]["messages"], it[0] or ""),
        )
        return tuple(
            BacklogGroup(
                name=name,
                messages=counted["messages"],
                waited=self._waited(part, name, now),
            )
            for name, counted in groups[:most]
        )

    def _waited(self, part: str, name: str | None, now: datetime) -> timedelta | None:
        oldest = self._oldest.get((part, name))
        return None if oldest is None else max(now - oldest, timedelta(0))


def _count_refused(backlogs: Sequence[Backlog | None]) -> int | None:
    """Return how many were refused; None if a count is missing or incomplete."""
    counts = [it.refused if it and it.is_complete else None for it in backlogs]
    return None if None in counts else sum(it or 0 for it in counts)


def _or_first(seq: int | None) -> int:
    return -1 if seq is None else seq


_NOTHING: Final = Backlog(
    messages=0,
    is_complete=True,
    estimated=0,
    ready=0,
    scheduled=0,
    refused=0,
    blocked=0,
    waited=None,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    pid: int
    name: str
    role: str | None
    client: str | None
    since: datetime | None
    lanes: list[int]


def read_processes(connection: AdministrationConnection) -> Processes:
    """Return the connected processes, as their sessions show them."""
    try:
        with connection.transaction():
            consumers = read_consumers(connection)
    except (psycopg.errors.UndefinedTable, psycopg.errors.InsufficientPrivilege):
        consumers = []  # without their names, their lanes are unknown
    classes = [LOCK_CLASS, *(consumer_class(name) for name in consumers)]
    with connection.cursor(row_factory=class_row(_Session)) as cursor:
        sessions = cursor.execute(
            load("outbox", "list_processes"),
            {"classes": [number & 0xFFFF_FFFF for number in classes]},
        ).fetchall()
    processes = _group_sessions(sessions)
    held = {lane for it in processes if it.kind == "relay" for lane in it.lanes}
    sees_all, role = sees_all_sessions(connection)
    return Processes(
        relays=tuple(it for it in processes if it.kind == "relay"),
        consumers=tuple(it for it in processes if it.kind == "consumer"),
        commands=tuple(it for it in processes if it.kind == "command"),
        lanes=LANES,
        free=tuple(sorted(set(range(LANES)) - held)),
        sees_all=sees_all,
        role=role,
        broker=next((broker for broker, _ in read_broker(connection)), None),
    )


def _group_sessions(sessions: Sequence[_Session]) -> list[Process]:
    groups: dict[tuple[str, str], list[_Session]] = {}
    for session in sessions:
        groups.setdefault(_identity(session.name), []).append(session)
    return [
        Process(
            kind=kind,
            name=name,
            replicas=sum(it.name.endswith(" lease") for it in group) or 1,
            sessions=len(group),
            roles=", ".join(sorted({it.role or "unknown" for it in group})),
            clients=", ".join(sorted({it.client or "local" for it in group})),
            since=min((it.since for it in group if it.since), default=None),
            lanes=tuple(sorted({lane for it in group for lane in it.lanes})),
        )
        for (kind, name), group in groups.items()
    ]


def _identity(name: str) -> tuple[str, str]:
    for kind, prefix in (("relay", _RELAY), ("consumer", _CONSUMER)):
        if name.startswith(prefix):
            rest, _, last = name.removeprefix(prefix).rpartition(" ")
            return kind, (
                rest
                if last in _PARTS_OF_A_PROCESS and rest
                else name.removeprefix(prefix)
            )
    return "command", name


def is_connected(processes: Processes, consumer: str) -> bool:
    """Return whether a consumer of the postgres broker is connected."""
    return _replicas({it.name: 1 for it in processes.consumers}, consumer) > 0


def _replicas(connected: Mapping[str, int], consumer: str) -> int:
    return sum(
        replicas
        for name, replicas in connected.items()
        if name == consumer or _is_cut(name, consumer)
    )


def _is_cut(shown: str, name: str) -> bool:
    # Its last word, such as "lease", can be cut off as well.
    return len((_CONSUMER + shown).encode()) > _MAX_NAME - 7 and name.startswith(shown)


def _judge(overview: Overview) -> Iterator[Finding]:
    """Yield the problems that an overview shows, with their remedies."""
    yield from _judge_outbox(overview)
    yield from _judge_consumers(overview)
    yield from _judge_failures(overview)
    yield from _judge_tables(overview)
    yield from _judge_upkeep(overview)
    yield from _judge_pins(overview)
    for part in overview.missing:
        yield Finding(
            check=part.part,
            severity=Severity.UNKNOWN,
            finding=f"{part.part.replace('_', ' ')}: {part.reason}",
            remedy=part.remedy,
        )


def _judge_outbox(overview: Overview) -> Iterator[Finding]:
    backlog, processes = overview.outbox, overview.processes
    if processes is not None and overview.is_standby:
        processes = None  # it doesn't show who is connected to its primary
    waited = None if backlog is None else backlog.waited
    if waited is None or waited < _WAITING:
        if processes is not None and not processes.relays:
            yield Finding(
                check="relays",
                severity=Severity.HINT,
                finding="no relay is connected: messages that are added will wait",
                remedy="pillarbox relay  # unless nothing is published from here",
            )
        return
    late = waited > _LATE
    oldest = f"the oldest due message has waited for {write_duration(waited)}"
    if processes is not None and not processes.relays:
        yield Finding(
            check="relays",
            severity=Severity.ERROR,
            finding=f"no relay is connected, and {oldest}",
            remedy="pillarbox relay  # start it",
        )
    elif processes is not None and processes.free:
        yield Finding(
            check="relays",
            severity=Severity.ERROR if late else Severity.WARNING,
            finding=f"{len(processes.free)} of {processes.lanes} lanes are held by no"
            f" relay, and {oldest}",
            remedy="pillarbox doctor  # names the sessions that keep relays from lanes",
        )
    elif late:
        yield Finding(
            check="backlogs",
            severity=Severity.WARNING,
            finding=oldest,
            remedy="read the relays' logs: what is slow, the broker or the database? Or"
            " start another relay",
        )


def _judge_consumers(overview: Overview) -> Iterator[Finding]:
    for consumer in overview.consumers:
        lag = consumer.lag
        if lag is None or lag.waited is None or lag.waited < _WAITING:
            continue
        waited = write_duration(lag.waited)
        if consumer.replicas == 0 and not overview.is_standby:
            yield Finding(
                check="consumers",
                severity=Severity.WARNING,
                finding=f"the consumer {consumer.name} is not connected, and its oldest"
                f" delivery has waited for {waited}",
                remedy="pillarbox consume  # start it; or pillarbox unsubscribe",
            )
        elif lag.waited > _LATE:
            yield Finding(
                check="consumers",
                severity=Severity.WARNING,
                finding=f"the oldest delivery of the consumer {consumer.name} has"
                f" waited for {waited}",
                remedy="read its log: is a handler slow? Or start another replica",
            )


def _judge_failures(overview: Overview) -> Iterator[Finding]:
    for blocked in overview.blocked:
        if not blocked.oldest:
            continue
        age = overview.at - blocked.oldest[0].created_at
        if age > _LATE:
            yield Finding(
                check="blocked",
                severity=Severity.WARNING,
                finding=f"messages of the {blocked.side} were refused and wait for"
                f" another attempt: {count(blocked.keys, 'blocked key')},"
                f" {count(blocked.without_key, 'message')} without a key, the"
                f" oldest added {write_duration(age)} ago",
                remedy=f"pillarbox blocked --side {blocked.side}  # with the reasons",
            )
    for letters in overview.dead_letters:
        if letters.pending:
            more = "" if letters.is_complete else "more than "
            yield Finding(
                check="dead_letters",
                severity=Severity.WARNING,
                finding=f"{more}{count(letters.pending, 'pending dead letter')} of the"
                f" {letters.side}, {letters.new:,} of them given up in the last"
                f" {exact_duration(letters.window)}",
                remedy=f"pillarbox dead-letters list --side {letters.side}"
                "  # then fix the cause, and retry or discard them",
            )
    for jobs in overview.jobs:
        if jobs.abandoned:
            yield Finding(
                check="jobs",
                severity=Severity.WARNING,
                finding=f"{count(jobs.abandoned, 'job')} of {jobs.consumer} without a"
                " worker: it died, and no other one has taken over",
                remedy=f"start the consumer {jobs.consumer}; pillarbox jobs lists them",
            )


def _judge_tables(overview: Overview) -> Iterator[Finding]:
    for table in overview.tables:
        if not table.has_today:
            yield _about_tables(
                Severity.ERROR,
                f"{table.table} has no partition for now: rows are refused",
                "pillarbox maintain",
            )
        elif table.ahead < min(_FEW_AHEAD, table.premake - 1):
            yield _about_tables(
                Severity.ERROR,
                f"{table.table} has {count(table.ahead, 'partition')} ahead, the policy"
                f" wants {table.premake}",
                "pillarbox maintain  # and find out why it doesn't run by itself",
            )
        if table.gaps:
            yield _about_tables(
                Severity.ERROR,
                f"{table.table} lacks {count(table.gaps, 'partition')} between those"
                " ahead: rows of that time will be refused",
                "pillarbox maintain  # or, if they stay, pillarbox doctor",
            )
        for held in table.held:
            yield _about_tables(
                Severity.WARNING,
                f"{held.partition} is past its retention for"
                f" {write_duration(held.overdue)} and held: {held.reason}",
                "pillarbox partitions  # shows the query that lists the rows",
            )


def _about_tables(severity: Severity, finding: str, remedy: str) -> Finding:
    return Finding(check="tables", severity=severity, finding=finding, remedy=remedy)


def _judge_upkeep(overview: Overview) -> Iterator[Finding]:
    upkeep = overview.upkeep
    if upkeep is None:
        return
    if upkeep.clock_problem is not None:
        severity, finding = Severity.ERROR, upkeep.clock_problem
    elif upkeep.failure is not None:
        severity = Severity.ERROR if upkeep.is_late else Severity.WARNING
        finding = f"the upkeep fails: {upkeep.failure}"
    elif upkeep.is_late:
        severity = Severity.ERROR
        finding = (
            "the upkeep has never succeeded"
            if upkeep.succeeded_at is None
            else f"the upkeep last succeeded at {upkeep.succeeded_at:%F %R}"
        )
    else:
        return
    yield Finding(
        check="upkeep",
        severity=severity,
        finding=finding,
        remedy="pillarbox doctor  # names the cause",
    )


def _judge_pins(overview: Overview) -> Iterator[Finding]:
    for pin in overview.pins:
        if pin.open_for is not None and pin.open_for < _LONG_PIN:
            continue
        who = f"{pin.kind} {pin.name}" if pin.name else pin.kind
        role = f" of {pin.role}" if pin.role else ""
        since = (
            f"open for {write_duration(pin.open_for)}"
            if pin.open_for is not None
            else f"{pin.xids} transactions behind"
            if pin.xids is not None
            else "without a reader, and retains WAL"
        )
        writes = ", and has written" if pin.is_writing else ""
        yield Finding(
            check="pins",
            severity=Severity.WARNING,
            finding=f"{who}{role} (pid {pin.pid or '-'}) is {since}{writes}: partitions"
            " can't be detached meanwhile",
            remedy=_end(pin),
        )


def _end(pin: Pin) -> str:
    name = sql.quote(pin.name or "")
    match pin.kind, pin.state:
        case "session", _:
            return f"SELECT pg_terminate_backend({pin.pid});"
        case "prepared transaction", _:
            return f"COMMIT PREPARED {name};  -- or ROLLBACK PREPARED"
        case "replication slot", "inactive":
            return f"SELECT pg_drop_replication_slot({name});  -- or start its reader"
        case _:
            return "SELECT * FROM pg_stat_replication;  -- how far each reader has come"
