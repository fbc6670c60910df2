"""The life of a message, and of the messages that it caused, from all tables.

`pillarbox trace` and the page's section Messages show the result. A message is looked
up in the days around the moment in its id, or in all days if the id contains no moment
or a wrong one. No payload is read, and the only headers read are the two that show what
led to the message, so the monitor's privileges are enough.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from itertools import count
from typing import Any, Final, LiteralString, TypeAlias
from uuid import UUID

from psycopg.rows import class_row, dict_row

from outbox.administration.connection import AdministrationConnection
from outbox.lane import PRIORITIES, Priority, lane_of, priority_of
from outbox.logs.printable import count as many
from outbox.message_id import is_uuid7, moment_of
from outbox.observability.measures.processes import Process, list_processes
from outbox.postgres.sql_files import load

MOST_MESSAGES: Final = 200
"""How many messages of a tree are read by default."""

_DEEPEST: Final = 50
_SKEW: Final = timedelta(days=1)
"""How much the clocks of writers and databases may differ."""
_EVER: Final = ("-infinity", "infinity")
_TABLES: Final = (
    "outbox.message",
    "outbox.dead_letter",
    "inbox.message",
    "inbox.receipt",
    "inbox.job",
    "inbox.suspect",
    "inbox.dead_letter",
)
_WORDS: Final = {
    ("outbox", "scheduled"): "claimed before it was due",
    ("outbox", "refused"): "refused by the broker",
    ("outbox", "postponed"): "postponed by the broker",
    ("outbox", "blocked"): "blocked by its key",
    ("outbox", "aside"): "set aside: too large for its batch",
    ("outbox", "unknown"): "published, outcome unknown",
    ("outbox", "found"): "found below the position",
    ("outbox", "replayed"): "replay requested",
    ("outbox", "dead_lettered"): "dead-lettered",
    ("inbox", "refused"): "returned for a retry",
    ("inbox", "blocked"): "blocked by its key",
    ("inbox", "open"): "delivered again: nobody had finished it",
    ("inbox", "found"): "found below the position",
    ("inbox", "started"): "started, not finished yet",
    ("", "dead_letter"): "became a dead letter",
    ("", "retry_failed"): "retry failed",
    ("", "retry_succeeded"): "retry succeeded",
    ("inbox", "delivered"): "in its queue",
    ("", "job_queued"): "job queued",
    ("", "job_started"): "job started",
    ("", "job_cancel_requested"): "cancel requested",
    ("", "job_success"): "job done",
    ("", "job_failure"): "job failed",
    ("", "job_cancelled"): "job cancelled",
    ("", "job_timed_out"): "job timed out",
    ("", "job_skipped"): "job skipped: handled before",
}
# Forces index scans for the rows of one message, whatever a new day's statistics say.
_PLAN: Final = (
    "SET LOCAL enable_seqscan = off; SET LOCAL enable_hashjoin = off;"
    " SET LOCAL enable_mergejoin = off; SET LOCAL jit = off; SET LOCAL timezone = 'UTC'"
)

_Bound: TypeAlias = datetime | str


class Found(StrEnum):
    """Whether a message was found."""

    FOUND = "found"
    NOT_FOUND = "not_found"
    NOT_KNOWABLE = "not_knowable"


class State(StrEnum):
    """The state of a message in the outbox, as in outbox.message_status."""

    READY = "ready"
    SCHEDULED = "scheduled"
    WAITING = "waiting"
    BLOCKED = "blocked"
    PUBLISHED = "published"
    DEAD_LETTERED = "dead_lettered"
    UNROUTED = "unrouted"
    DISCARDED = "discarded"


_SETTLED: Final = (State.PUBLISHED, State.DEAD_LETTERED, State.DISCARDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A message without its content, as it was added.

    Attributes:
        database: the name, as given, of the database that contains it.
        available_at: the time for which it was scheduled; None if it was due at once.
        causation_id: the message whose handler added it.
    """

    id: UUID
    created_at: datetime
    seq: int
    lane: int
    schema_version: int
    topic: str
    key: str | None
    tenant: str | None
    available_at: datetime | None
    content_type: str
    payload_bytes: int
    causation_id: str | None
    traceparent: str | None
    database: str = ""

    @property
    def priority(self) -> Priority:
        """The class in which it waits."""
        return priority_of(self.lane)


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeStep:
    """One thing that happened to a message.

    Attributes:
        at: when it was recorded, by the clock of its database; for `handled`, when the
            handler's transaction began.
        what: as in the views `outbox.message_life` and `inbox.message_life`.
        source: the table that records it.
        consumer: the consumer whose step it is; None for a step of the outbox.
        run: 0 for the first publication, n for the n-th replay.
        attempts: how often the message had failed, or had been started.
        due_at: when the next step is due, or a lease ends.
        by: who requested the step, carried it out, or dead-lettered the message.
    """

    at: datetime
    what: str
    source: str
    database: str
    consumer: str | None = None
    run: int = 0
    attempts: int = 0
    due_at: datetime | None = None
    by: str | None = None
    reason: str | None = None

    @property
    def text(self) -> str:
        """The step in words."""
        side = "inbox" if self.source.startswith("inbox.") else "outbox"
        return _WORDS.get((side, self.what)) or _WORDS.get(("", self.what), self.what)


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A row of `outbox.message_status`.

    Attributes:
        run: the number of its replays.
        attempts: how often the broker refused it in this run.
        available_at: when it is next due; None if it is due at once, or never again.
        published_at: when its first publication was recorded.
        reader: which reader is to publish it, or has; None: no reader gets it.
    """

    state: str
    run: int
    attempts: int
    available_at: datetime | None
    published_at: datetime | None
    last_error: str | None
    reader: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What is known about one message.

    Attributes:
        envelopes: the message as it was added; more than one if its id was used again,
            none if its day was dropped or it was added elsewhere.
        steps: what happened to it, in chronological order.
        status: its state in the outbox; None if no outbox that was read contains it.
        waits: why it isn't published yet, in a sentence; None if it doesn't wait.
    """

    id: str
    envelopes: tuple[Envelope, ...] = ()
    steps: tuple[LifeStep, ...] = ()
    status: Status | None = None
    waits: str | None = None

    @property
    def state(self) -> State | None:
        """Its state in the outbox."""
        return None if self.status is None else State(self.status.state)

    @property
    def envelope(self) -> Envelope | None:
        """The message as it was first added."""
        return self.envelopes[0] if self.envelopes else None

    @property
    def topic(self) -> str:
        """Its topic, if that is known."""
        return self.envelopes[0].topic if self.envelopes else "unknown topic"

    @property
    def added_at(self) -> datetime | None:
        """When it was added; if no table shows that, the moment in its id."""
        if self.envelopes:
            return self.envelopes[0].created_at
        return _moment_in(_uuid(self.id))

    @property
    def published_at(self) -> datetime | None:
        """When its first publication was recorded; a replay doesn't change it."""
        return None if self.status is None else self.status.published_at

    @property
    def replays(self) -> int:
        """How often it was replayed."""
        return 0 if self.status is None else self.status.run

    @property
    def handlings(self) -> tuple[LifeStep, ...]:
        """The step of each consumer that decides how far it is, by its name."""
        last: dict[str, LifeStep] = {}
        for step in self.steps:
            name = step.consumer
            if name is not None and (
                name not in last or _rank(step) >= _rank(last[name])
            ):
                last[name] = step
        return tuple(last[name] for name in sorted(last))


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A message and the messages that its handlers added.

    Attributes:
        is_cut: whether some of the messages it caused were not read.
    """

    life: Life
    caused: tuple["Branch", ...] = ()
    is_cut: bool = False

    def walk(self) -> Iterator["Branch"]:
        """Yield this branch and all branches below it."""
        yield self
        for branch in self.caused:
            yield from branch.walk()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A message, what led to it, and what it caused.

    Attributes:
        causes: the messages that led to it, from the first to the direct cause.
        failing: the consumers of these databases that fail now and have not handled it.
        unknown: what the databases don't contain any more, or never did, in sentences.
    """

    found: Found
    branch: Branch
    causes: tuple[Life, ...] = ()
    failing: tuple[Process, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def life(self) -> Life:
        """The life of the message itself."""
        return self.branch.life


@dataclass(frozen=True, slots=True, kw_only=True)
class Lives:
    """Messages of a key, newest first.

    Attributes:
        since: only messages added at this time or later were searched for.
        unknown: as in `Trace`.
    """

    found: Found
    lives: tuple[Life, ...]
    since: datetime
    unknown: tuple[str, ...] = ()


Databases: TypeAlias = Mapping[str, AdministrationConnection]
"""Connections in autocommit mode, or in a transaction, by the name of each database."""


def read_trace(
    databases: Databases, id: str, *, max_messages: int = MOST_MESSAGES
) -> Trace:
    """Read the life of a message, and the tree of what it caused.

    Args:
        databases: those of the outboxes and of the consumers, in any order.
        id: the id of the message; one that isn't a UUID is looked up in foreign
            receipts.
        max_messages: the most messages of the tree to read.

    Raises:
        psycopg.Error: as raised by the connections; `InsufficientPrivilege` if a role
            lacks the monitor's privileges.
    """
    with _planned_for_one_message(databases):
        uuid = _uuid(id)
        if uuid is None:
            return _read_foreign(databases, id)
        id = str(uuid)
        reader = _Reader(databases)
        reader.find([uuid])
        causes = reader.find_causes(uuid)
        children, cut = reader.find_tree(uuid, max_messages)
        lives = reader.read_lives([uuid, *causes, *_below(children, uuid)])
        unknown, is_gone = _unknown(databases, lives[uuid])
        found = (
            Found.FOUND
            if lives[uuid].steps or children.get(uuid)
            else Found.NOT_KNOWABLE
            if is_gone
            else Found.NOT_FOUND
        )
        return Trace(
            found=found,
            branch=_branch(uuid, lives, children, cut),
            causes=tuple(lives[it] for it in causes),
            failing=tuple(_failing(databases, lives[uuid])),
            unknown=unknown,
        )


def read_lives_of_key(
    databases: Databases, key: str, *, since: datetime, max_messages: int
) -> Lives:
    """Read the lives of the newest messages of a key that were added since a moment.

    All messages of the key's lanes are read, newest first, until enough are found.
    These lanes hold about 6 % of all messages added since that moment.
    """
    with _planned_for_one_message(databases):
        reader = _Reader(databases)
        ids = reader.find_key(key, since, max_messages)
        lives = reader.read_lives(ids)
        unknown = tuple(
            f"messages before: {table} of {name} begins {_moment(begins_at)}"
            for name, connection in databases.items()
            for table, begins_at, _ in _low_water(connection, ["outbox.message"], since)
            if begins_at is None or since < begins_at
        )
    newest = sorted(
        lives.values(), key=lambda life: life.added_at or since, reverse=True
    )
    return Lives(
        found=(
            Found.FOUND
            if newest
            else Found.NOT_KNOWABLE
            if unknown
            else Found.NOT_FOUND
        ),
        lives=tuple(newest),
        since=since,
        unknown=unknown,
    )


class _Reader:
    """Reads envelopes and lives of messages, in one or two statements per database."""

    def __init__(self, databases: Databases) -> None:
        self._databases = databases
        self._envelopes: dict[UUID, list[Envelope]] = {}

    def find(self, ids: Sequence[UUID]) -> None:
        """Find messages by id: near the moments in the ids, or else in all days."""
        windows = [it for it in map(_moment_in, ids) if it is not None]
        if windows:
            self._find(ids, (min(windows) - _SKEW, max(windows) + 2 * _SKEW))
        missing = [id for id in ids if id not in self._envelopes]
        if missing:
            self._find(missing, _EVER)

    def find_causes(self, id: UUID) -> list[UUID]:
        """Find the messages that led to a message, starting with the first."""
        causes: list[UUID] = []
        while len(causes) < _DEEPEST:
            envelopes = self._envelopes.get(causes[0] if causes else id)
            cause = _uuid(envelopes[0].causation_id or "") if envelopes else None
            if cause is None or cause == id or cause in causes:
                break
            self.find([cause])
            causes.insert(0, cause)
        return causes

    def find_tree(
        self, id: UUID, most: int
    ) -> tuple[dict[UUID, list[UUID]], set[UUID]]:
        """Find the messages that a message caused, level by level: children by parent.

        Also returns the messages that have children which were left out.
        """
        children: dict[UUID, list[UUID]] = {}
        cut: set[UUID] = set()
        known, level = {id}, [id]
        for depth in count():
            if not level:
                break
            if depth == _DEEPEST or len(known) >= most:
                cut |= set(level)
                break
            moments = [self._since(it) for it in level]
            since = None if None in moments else min(it for it in moments if it)
            found = self._find_caused(level, since, most + 1)
            level = []
            for envelope in found:
                cause = _uuid(envelope.causation_id or "")
                if cause is None:
                    continue
                if envelope.id not in known:
                    if len(known) >= most:
                        cut.add(cause)
                        continue
                    known.add(envelope.id)
                    level.append(envelope.id)
                    children.setdefault(cause, []).append(envelope.id)
                self._keep(envelope)
        return children, cut

    def find_key(self, key: str, since: datetime, most: int) -> list[UUID]:
        """Find the newest messages of a key."""
        lanes = [lane_of(key, UUID(int=0), it) for it in PRIORITIES]
        values = {"key": key, "lanes": lanes, "since": since, "max_rows": most}
        found = self._run(load("outbox", "find_envelopes_of_key"), values)
        found.sort(key=lambda it: it.created_at, reverse=True)
        for envelope in found[:most]:
            self._keep(envelope)
        return list(self._envelopes)

    def read_lives(self, ids: Sequence[UUID]) -> dict[UUID, Life]:
        """Read the lives of messages that were looked up before."""
        ids = list(dict.fromkeys(ids))
        if not ids:
            return {}
        steps: dict[UUID, list[LifeStep]] = {id: [] for id in ids}
        statuses: dict[tuple[UUID, datetime], Status] = {}
        starts = [self._since(id) for id in ids]
        since: _Bound = _EVER[0]
        if None not in starts:
            since = min(it for it in starts if it) - _SKEW
        for name, connection in self._databases.items():
            added = [
                it.created_at
                for id in ids
                for it in self._envelopes.get(id, ())
                if it.database == name
            ]
            days: dict[str, _Bound] = {
                # Without a message, no day: the range ends before it begins.
                "first": min(added, default=_EVER[1]),
                "last": max(added, default=_EVER[0]),
                "since": since,
            }
            values = {"ids": ids, **days}
            statement = load("outbox", "read_lives")
            self._read_steps(name, connection, statement, values, steps)
            for row in _rows(connection, load("outbox", "read_statuses"), values):
                place = row.pop("id"), row.pop("created_at")
                statuses[place] = Status(**row)
            # Only messages whose id contains a moment have receipts.
            moments = [it for it in map(_moment_in, ids) if it is not None]
            days["first"] = min(moments, default=_EVER[1])
            days["last"] = max(moments, default=_EVER[0])
            values = {"ids": ids, **days}
            statement = load("outbox", "read_lives_at_consumers")
            self._read_steps(name, connection, statement, values, steps)
        return {id: self._life(id, steps[id], statuses) for id in ids}

    def _find(self, ids: Sequence[UUID], days: tuple[_Bound, _Bound]) -> None:
        values = {"ids": list(ids), "first": days[0], "last": days[1]}
        for envelope in self._run(load("outbox", "find_envelopes"), values):
            self._keep(envelope)

    def _find_caused(
        self, causes: Sequence[UUID], since: datetime | None, most: int
    ) -> list[Envelope]:
        values = {
            "causes": [str(id) for id in causes],
            "since": _EVER[0] if since is None else since - _SKEW,
            "max_rows": most,
        }
        found = self._run(load("outbox", "find_caused"), values)
        return sorted(found, key=lambda it: (it.created_at, it.seq))

    def _run(self, query: Any, values: Mapping[str, Any]) -> list[Envelope]:
        found: list[Envelope] = []
        for name, connection in self._databases.items():
            with connection.cursor(row_factory=class_row(Envelope)) as cursor:
                # Planned for these values, so that other days are pruned.
                rows = cursor.execute(query, values, prepare=False)
                found += [replace(it, database=name) for it in rows]
        return found

    def _keep(self, envelope: Envelope) -> None:
        kept = self._envelopes.setdefault(envelope.id, [])
        if envelope not in kept:
            kept.append(envelope)

    def _since(self, id: UUID) -> datetime | None:
        """Return the earliest moment at which a message can have a step."""
        known = [it.created_at for it in self._envelopes.get(id, ())]
        moment = _moment_in(id)
        return min([*known, *([] if moment is None else [moment])], default=None)

    @staticmethod
    def _read_steps(
        name: str,
        connection: AdministrationConnection,
        statement: LiteralString,
        values: Mapping[str, Any],
        steps: Mapping[UUID, list[LifeStep]],
    ) -> None:
        for row in _rows(connection, statement, values):
            id, what = row.pop("message_id"), row.pop("step")
            steps[id].append(LifeStep(what=what, database=name, **row))

    def _life(
        self,
        id: UUID,
        steps: list[LifeStep],
        statuses: Mapping[tuple[UUID, datetime], Status],
    ) -> Life:
        steps = sorted(_without_receipts_of_discards(steps), key=_order)
        envelopes = tuple(self._envelopes.get(id, ()))
        life = Life(id=str(id), envelopes=envelopes, steps=tuple(steps))
        if not envelopes:
            return life
        status = statuses.get((id, envelopes[0].created_at))
        waits = None
        if status is not None and status.state not in _SETTLED:
            database = self._databases[envelopes[0].database]
            waits = _why(database, status, envelopes[0])
        return replace(life, status=status, waits=waits)


def _rows(
    connection: AdministrationConnection,
    statement: LiteralString,
    values: Mapping[str, Any],
) -> list[dict[str, Any]]:
    with connection.cursor(row_factory=dict_row) as cursor:
        # Planned for these values, so that other days are pruned.
        return cursor.execute(statement, values, prepare=False).fetchall()


def _why(
    connection: AdministrationConnection, status: Status, envelope: Envelope
) -> str:
    due = _moment(status.available_at)
    match status.state:
        case State.SCHEDULED:
            return f"scheduled for {due}"
        case State.WAITING:
            reason = status.last_error or "no reason is known"
            times = many(status.attempts, "time")
            return f"refused {times}, next attempt at {due}: {reason}"
        case State.BLOCKED:
            return _what_blocks(connection, status, envelope)
        case State.UNROUTED:
            return "no reader gets its topic; pillarbox readers add lets one get it"
    relays = len(list_processes(connection, "outbox"))
    if not relays:
        return "due now, and no relay is running"
    return f"due now, and not published yet; {many(relays, 'relay')} running"


def _what_blocks(
    connection: AdministrationConnection, status: Status, envelope: Envelope
) -> str:
    found = connection.execute(
        load("outbox", "find_blocking_message"),
        {
            "reader": status.reader,
            "lane": envelope.lane,
            "key": envelope.key,
            "seq": envelope.seq,
            "since": _EVER[0],
        },
        prepare=False,
    ).fetchone()
    if found is None:
        return "its key is no longer blocked: it is next"
    id, cause, due_at, attempts = found
    if cause == "blocked":
        return f"waits behind {id} of its key"
    return (
        f"waits behind {id} of its key, which was refused {many(attempts, 'time')}; "
        f"its next attempt is at {_moment(due_at)}"
    )


_FINAL: Final = {
    "acked": 0,
    "discarded": 2,
    "handled": 3,
    "job_success": 3,
    "retry_succeeded": 3,
}


def _rank(step: LifeStep) -> int:
    """Return how much a step decides: a receipt or a discard is final."""
    return _FINAL.get(step.what, 1)


def _failing(databases: Databases, life: Life) -> Iterator[Process]:
    done = {it.consumer for it in life.handlings if _rank(it) > 1}
    for connection in databases.values():
        for process in list_processes(connection, "inbox"):
            if process.failing_since is not None and process.name not in done:
                yield process


def _without_receipts_of_discards(steps: Sequence[LifeStep]) -> list[LifeStep]:
    """Leave out the receipts that a discard writes to keep a message from its handler.

    They are written in the discard's transaction, so both have the same moment.
    """
    discards = {(it.consumer, it.at) for it in steps if it.what == "discarded"}
    return [
        it
        for it in steps
        if it.what != "handled" or (it.consumer, it.at) not in discards
    ]


def _order(step: LifeStep) -> tuple[datetime, int]:
    """Sort by moment; a message was added before it was settled, despite rounding."""
    return step.at, 0 if step.what == "added" else 1


def _branch(
    id: UUID,
    lives: Mapping[UUID, Life],
    children: Mapping[UUID, Sequence[UUID]],
    cut: set[UUID],
) -> Branch:
    return Branch(
        life=lives[id],
        caused=tuple(
            _branch(child, lives, children, cut) for child in children.get(id, ())
        ),
        is_cut=id in cut,
    )


def _below(children: Mapping[UUID, Sequence[UUID]], id: UUID) -> Iterator[UUID]:
    for child in children.get(id, ()):
        yield child
        yield from _below(children, child)


def _read_foreign(databases: Databases, id: str) -> Trace:
    """Read what is known about an id that isn't a UUID."""
    steps = [
        LifeStep(what=row.pop("step"), database=name, **row)
        for name, connection in databases.items()
        for row in _rows(connection, load("outbox", "read_foreign_life"), {"id": id})
    ]
    life = Life(id=id, steps=tuple(sorted(steps, key=_order)))
    return Trace(
        found=Found.FOUND if steps else Found.NOT_KNOWABLE,
        branch=Branch(life=life),
        unknown=(
            "an id that isn't a UUID is of another producer: only receipts that are "
            "still kept, and dead letters, contain it",
        ),
    )


def _unknown(databases: Databases, life: Life) -> tuple[tuple[str, ...], bool]:
    """Return what can't be known about a message, and whether all of it may be gone."""
    at = life.added_at
    texts: list[str] = []
    is_gone = at is None
    for name, connection in databases.items():
        where = f" of {name}" if len(databases) > 1 else ""
        for table, begins_at, detached in _low_water(connection, _TABLES, at):
            if at is not None and begins_at is not None and at >= begins_at:
                continue
            if table == "outbox.message" and life.envelopes:
                continue
            is_gone = is_gone or table == "outbox.message"
            begins = "is empty" if begins_at is None else f"begins {_moment(begins_at)}"
            kept = f"; {detached}, detached, still has that day" if detached else ""
            texts.append(
                f"{table}{where} {begins}, after this message; what was before was"
                f" dropped, or never was{kept}"
            )
    handled = any(it.consumer is not None for it in life.steps)
    if life.published_at is not None and not handled:
        texts.append(
            "what the broker did with it: only the postgres broker's deliveries, and "
            "consumers whose database was given, leave anything here"
        )
    return tuple(texts), is_gone


def _low_water(
    connection: AdministrationConnection, tables: Sequence[str], at: datetime | None
) -> list[tuple[str, datetime | None, str | None]]:
    cursor = connection.execute(
        load("outbox", "list_low_water_marks"), {"tables": list(tables), "at": at}
    )
    return [(table, begins_at, detached) for table, begins_at, detached in cursor]


@contextmanager
def _planned_for_one_message(databases: Databases) -> Iterator[None]:
    """Open a transaction in each database, with settings that end with it."""
    with ExitStack() as transactions:
        for connection in databases.values():
            transactions.enter_context(connection.transaction())
            connection.execute(_PLAN)
        yield


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def _moment_in(id: UUID | None) -> datetime | None:
    if id is None or not is_uuid7(id):
        return None
    try:
        return moment_of(id)
    except OverflowError:
        return None  # after the year 9999


def _moment(at: datetime | None) -> str:
    return (
        "an unknown time"
        if at is None
        else f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    )
