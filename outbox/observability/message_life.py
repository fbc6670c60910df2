"""The life of a message, and of the messages that it caused, from all tables.

`pillarbox trace` and the page's section Messages show the rows of `message_status` and
of `message_life` of both sides. A message is looked up in the days around the moment in
its id, or in all days if the id contains no moment or a wrong one. No payload is read,
and the only headers read are the two that show what led to the message, so the
monitor's privileges are enough.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final, LiteralString, NamedTuple, TypeAlias
from uuid import UUID

from psycopg.rows import dict_row

from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.errors import ConfigError, shorten
from pillarbox.outbox.lane import PRIORITIES, Priority, lane_of, priority_of
from pillarbox.outbox.logs.printable import count as many
from pillarbox.outbox.message_id import is_uuid7, moment_of
from pillarbox.outbox.observability.measures.processes import Process, list_processes
from pillarbox.outbox.postgres.sql_files import load

MOST_MESSAGES: Final = 200
"""How many messages of a tree are read by default."""

_DEEPEST: Final = 50
_SKEW: Final = timedelta(days=1)
"""How much the clocks of writers and databases may differ."""
_EVER: Final = ("-infinity", "infinity")
_TABLES: Final = (
    "outbox.message",
    "outbox.dead_letter",
    "inbox.receipt",
    "inbox.job",
    "inbox.suspect",
    "inbox.dead_letter",
)
# The other steps need no words but their names in the views.
_WORDS: Final = {
    "aside": "postponed: too large for its batch",
    "unknown": "published, outcome unknown",
    "open": "being handled",
}
# Forces index scans for the rows of one message, whatever a new day's statistics say.
_PLAN: Final = (
    "SET LOCAL enable_seqscan = off; SET LOCAL enable_hashjoin = off;"
    " SET LOCAL enable_mergejoin = off; SET LOCAL jit = off; SET LOCAL timezone = 'UTC'"
)

_NAMED: Final = re.compile(r"^(.+?) ([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}): ")
"""A consumer's failure that begins with the topic and the id of its message."""

_Bound: TypeAlias = datetime | str
_Row: TypeAlias = dict[str, Any]


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
    HANDLED = "handled"
    DEAD_LETTERED = "dead_lettered"
    UNROUTED = "unrouted"
    DISCARDED = "discarded"
    CANCELLED = "cancelled"


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
    database: str

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
        consumer: the consumer whose step it is; None for a step of the outbox, unless a
            consumer reads it.
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
        return _WORDS.get(self.what, self.what.replace("_", " "))


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """All that is known about one message.

    Attributes:
        envelopes: the message as it was added; more than one if its id was used again,
            none if its day was dropped or it was added elsewhere.
        steps: what happened to it, in chronological order.
        state: its state in the outbox; None if no outbox that was read contains it.
        published_at: when it was first recorded as published, or as handled by a
            consumer that reads the outbox.
        replays: how often it was replayed.
        waits: why it isn't published or handled yet, in a sentence; None if it doesn't
            wait.
        caused: the messages that its handlers added.
    """

    id: str
    envelopes: tuple[Envelope, ...] = ()
    steps: tuple[LifeStep, ...] = ()
    state: State | None = None
    published_at: datetime | None = None
    replays: int = 0
    waits: str | None = None
    caused: tuple["Life", ...] = ()

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
class Trace:
    """A message, its causes, and the messages that it caused.

    Attributes:
        causes: the messages that led to it, from the first to the direct cause.
        is_cut: whether it caused more messages than were read.
        failing: the processes of consumers that have not handled it and fail now, at no
            message or one of its topic or key, have an overdue handler, or have been
            handling it for long.
        unknown: what the databases don't contain any more, or never did, and which
            could not be reached, in sentences.
    """

    found: Found
    life: Life
    causes: tuple[Life, ...] = ()
    is_cut: bool = False
    failing: tuple[Process, ...] = ()
    unknown: tuple[str, ...] = ()


class Lives(NamedTuple):
    """Messages of a key, newest first; the rest is as in `Trace`."""

    found: Found
    lives: tuple[Life, ...]
    unknown: tuple[str, ...]


Databases: TypeAlias = Mapping[str, AdministrationConnection]
"""Connections in autocommit mode, or in a transaction, by the name of each database."""


def read_trace(
    databases: Databases,
    id: UUID,
    *,
    away: Sequence[str] = (),
    max_messages: int = MOST_MESSAGES,
) -> Trace:
    """Read the life of a message, and the tree of the messages that it caused.

    Args:
        databases: those of the outboxes and of the consumers, in any order.
        away: which other databases could not be reached, in sentences.
        max_messages: the most messages of the tree to read.

    Raises:
        psycopg.Error: as raised by the connections; `InsufficientPrivilege` if a role
            lacks the monitor's privileges.
    """
    with _planned_for_one_message(databases):
        reader = _Reader(databases)
        reader.find(id)
        causes = reader.find_causes(id)
        is_cut = reader.find_effects(id, max_messages)
        lives = reader.read_lives([id, *causes, *reader.envelopes])
        life = _with_effects(lives, id)
        led_to_it = tuple(lives[it] for it in causes)
        unknown, may_be_gone = _unknown(databases, life)
        if missing := "; ".join(_elsewhere(life, led_to_it)):
            where = " or ".join(databases)
            unknown += (f"not in {where}: {missing}; add its database: --database URL",)
        is_found = bool(life.steps or life.caused)
        return Trace(
            found=_found(is_found, may_be_gone=may_be_gone or bool(away)),
            life=life,
            causes=led_to_it,
            is_cut=is_cut,
            failing=_failing(reader, databases, life),
            unknown=(*away, *unknown),
        )


def read_lives_of_key(
    databases: Databases,
    key: str,
    *,
    since: datetime,
    away: Sequence[str] = (),
    max_messages: int,
) -> Lives:
    """Read the lives of the newest messages of a key that were added since a moment.

    All messages of the key's lanes are read, newest first, until enough are found.
    These lanes hold about 6 % of all messages added since that moment.
    """
    with _planned_for_one_message(databases):
        reader = _Reader(databases)
        reader.find_key(key, since, max_messages)
        lives = tuple(reader.read_lives(list(reader.envelopes)).values())
        unknown = (
            *away,
            *(
                f"older messages: {table} of {name} begins {write_moment(begins_at)}"
                for name, connection in databases.items()
                for table, begins_at in _low_water(connection, ["outbox.message"])
                if begins_at is None or since < begins_at
            ),
        )
    return Lives(_found(bool(lives), may_be_gone=bool(unknown)), lives, unknown)


def _found(is_found: bool, *, may_be_gone: bool) -> Found:
    if is_found:
        return Found.FOUND
    return Found.NOT_KNOWABLE if may_be_gone else Found.NOT_FOUND


def _with_effects(lives: Mapping[UUID, Life], id: UUID) -> Life:
    """Return the life of a message with the messages that it caused, as a tree."""
    caused: dict[str | None, list[UUID]] = defaultdict(list)
    for it, life in lives.items():
        for cause in {envelope.causation_id for envelope in life.envelopes}:
            caused[cause].append(it)
    seen = {id}

    def grow(id: UUID) -> Life:
        new = [it for it in caused[str(id)] if it not in seen]
        seen.update(new)
        return replace(lives[id], caused=tuple(map(grow, new)))

    return grow(id)


class _Reader:
    """Reads envelopes and lives of messages, in one or two statements per database."""

    def __init__(self, databases: Databases) -> None:
        self._databases = databases
        self.envelopes: dict[UUID, list[Envelope]] = {}

    def find(self, id: UUID) -> None:
        """Find a message: near the moment in its id, or else in all days."""
        windows: list[tuple[_Bound, _Bound]] = [_EVER]
        if (moment := _moment_in(id)) is not None:
            windows.insert(0, (moment - _SKEW, moment + 2 * _SKEW))
        for first, last in windows:
            values = {"ids": [id], "first": first, "last": last}
            for envelope in self._run(load("outbox", "find_envelopes"), values):
                self._keep(envelope)
            if id in self.envelopes:
                return

    def find_causes(self, id: UUID) -> list[UUID]:
        """Find the messages that led to a message, starting with the first."""
        causes: list[UUID] = []
        while len(causes) < _DEEPEST:
            envelopes = self.envelopes.get(causes[0] if causes else id)
            cause = _uuid(envelopes[0].causation_id or "") if envelopes else None
            if cause is None or cause == id or cause in causes:
                break
            self.find(cause)
            causes.insert(0, cause)
        return causes

    def find_effects(self, id: UUID, most: int) -> bool:
        """Find what a message caused, level by level; return whether there is more."""
        known, level = {id}, [id]
        moments = self._moments(id)
        since = min(moments) - _SKEW if moments else _EVER[0]
        for _ in range(_DEEPEST):
            values = {
                "causes": list(map(str, level)),
                "since": since,
                "max_rows": most + 1,
            }
            found = self._run(load("outbox", "find_caused"), values) if level else []
            found.sort(key=lambda it: (it.created_at, it.seq))
            level = []
            for envelope in found:
                if envelope.id not in known:
                    if len(known) >= most:
                        return True
                    known.add(envelope.id)
                    level.append(envelope.id)
                self._keep(envelope)
        return bool(level)

    def find_key(self, key: str, since: datetime, most: int) -> None:
        """Find the newest messages of a key."""
        lanes = [lane_of(key, UUID(int=0), it) for it in PRIORITIES]
        values = {"key": key, "lanes": lanes, "since": since, "max_rows": most}
        found = self._run(load("outbox", "find_envelopes_of_key"), values)
        found.sort(key=lambda it: it.created_at, reverse=True)
        for envelope in found[:most]:
            self._keep(envelope)

    def read_lives(self, ids: Sequence[UUID]) -> dict[UUID, Life]:
        """Read the lives of messages that were looked up before."""
        steps: dict[UUID, list[LifeStep]] = {id: [] for id in ids}
        statuses: dict[tuple[UUID, datetime], _Row] = {}
        moments = {id: self._moments(id) for id in steps}
        known = [it for each in moments.values() for it in each]
        values = {
            "ids": list(steps),
            # Without a moment, no day: the range ends before it begins.
            "first": min(known, default=_EVER[1]),
            "last": max(known, default=_EVER[0]),
            "since": min(known) - _SKEW
            if known and all(moments.values())
            else _EVER[0],
        }
        for name, connection in self._databases.items():
            for statement in ("read_lives", "read_lives_at_consumers"):
                for row in _rows(connection, load("outbox", statement), values):
                    id, what = row.pop("message_id"), row.pop("step")
                    steps[id].append(LifeStep(what=what, database=name, **row))
            for row in _rows(connection, load("outbox", "read_statuses"), values):
                statuses[row["id"], row["created_at"]] = row
        return {id: self._life(id, steps[id], statuses) for id in steps}

    def _run(self, query: LiteralString, values: Mapping[str, Any]) -> list[Envelope]:
        return [
            Envelope(**row, database=name)
            for name, connection in self._databases.items()
            for row in _rows(connection, query, values)
        ]

    def _keep(self, envelope: Envelope) -> None:
        kept = self.envelopes.setdefault(envelope.id, [])
        if envelope not in kept:
            kept.append(envelope)

    def _moments(self, id: UUID) -> list[datetime]:
        """Return when a message was added, and the moment in its id, if known."""
        added = [it.created_at for it in self.envelopes.get(id, ())]
        moment = _moment_in(id)
        return added if moment is None else [*added, moment]

    def _life(
        self,
        id: UUID,
        steps: list[LifeStep],
        statuses: Mapping[tuple[UUID, datetime], _Row],
    ) -> Life:
        # A discard writes a receipt, to keep the message from its handler.
        discards = {(it.consumer, it.at) for it in steps if it.what == "discarded"}
        steps = [
            it
            for it in steps
            if it.what != "handled" or (it.consumer, it.at) not in discards
        ]
        # A message was added before it was settled, despite rounding.
        steps.sort(key=lambda it: (it.at, it.what != "added"))
        envelopes = tuple(self.envelopes.get(id, ()))
        life = Life(id=str(id), envelopes=envelopes, steps=tuple(steps))
        status = statuses.get((id, envelopes[0].created_at)) if envelopes else None
        if status is None:
            return life
        return replace(
            life,
            state=State(status["state"]),
            published_at=status["published_at"],
            replays=status["run"],
            waits=_why(self._databases[envelopes[0].database], status, envelopes[0]),
        )


def _rows(
    connection: AdministrationConnection,
    statement: LiteralString,
    values: Mapping[str, Any],
) -> list[_Row]:
    with connection.cursor(row_factory=dict_row) as cursor:
        # Planned for these values, so that other days are pruned.
        return cursor.execute(statement, values, prepare=False).fetchall()


def _why(
    connection: AdministrationConnection, status: _Row, envelope: Envelope
) -> str | None:
    """Say why a message isn't published yet; None if it is settled."""
    due = write_moment(status["available_at"])
    match status["state"]:
        case (
            State.PUBLISHED
            | State.HANDLED
            | State.DEAD_LETTERED
            | State.DISCARDED
            | State.CANCELLED
        ):
            return None
        case State.SCHEDULED:
            return f"scheduled for {due} UTC"
        case State.WAITING:
            reason = status["last_error"] or "unknown reason"
            verb = "failed" if status["is_consumer"] else "refused"
            times = many(status["attempts"], "time")
            return f"{verb} {times}, next attempt at {due} UTC: {reason}"
        case State.BLOCKED:
            values = {
                "reader": status["reader"],
                "lane": envelope.lane,
                "key": envelope.key,
                "seq": envelope.seq,
            }
            statement = load("outbox", "find_blocking_message")
            for it in _rows(connection, statement, values):
                return (
                    f"waiting for {it['id']} of the same key, whose next attempt is at"
                    f" {write_moment(it['due_at'])} UTC"
                )
            return "its key is no longer blocked: it is next"
        case State.UNROUTED:
            return "no reader gets it; add one with pillarbox readers add --from-oldest"
    if status["is_consumer"]:
        return f"due, but not handled yet by {status['reader']}"
    relays = len(list_processes(connection, "outbox"))
    if not relays:
        return "due, but no relay is running"
    return f"due, but not published yet; {many(relays, 'relay')} running"


_FINAL: Final = {
    "scheduled": 0,
    "postponed": 0,
    "refused": 0,
    "blocked": 0,
    "open": 0,
    "found": 0,
    "acked": 0,
    "discarded": 2,
    "handled": 3,
    "job_success": 3,
    "retry_succeeded": 3,
}


def _rank(step: LifeStep) -> int:
    """Return how much a step decides: a receipt or a discard is final.

    What the outbox records of a consumer says least: a message that became a dead
    letter is acked, too.
    """
    return _FINAL.get(step.what, 1)


def _failing(reader: _Reader, databases: Databases, life: Life) -> tuple[Process, ...]:
    done = {it.consumer for it in life.handlings if _rank(it) > 1}
    keys = {it.key for it in life.envelopes} - {None}

    def is_failing(process: Process) -> bool:
        if process.failing_since is not None:
            # A failure that names no message, such as a lost broker, concerns all.
            named = _NAMED.search(process.reason or "")
            if named is None or named[1] == life.topic or not life.envelopes:
                return True
            reader.find(id := UUID(named[2]))
            return any(it.key in keys for it in reader.envelopes.get(id, ()))
        return (
            process.is_overdue(datetime.now(UTC)) or str(process.running_id) == life.id
        )

    return tuple(
        process
        for connection in databases.values()
        for process in list_processes(connection, "inbox")
        if process.name not in done and is_failing(process)
    )


def _unknown(databases: Databases, life: Life) -> tuple[tuple[str, ...], bool]:
    """Return what can't be known about a message, and whether all of it may be gone."""
    at = life.added_at
    texts: list[str] = []
    may_be_gone = at is None
    for name, connection in databases.items():
        where = f" of {name}" if len(databases) > 1 else ""
        for table, begins_at in _low_water(connection, _TABLES):
            if at is not None and begins_at is not None and at >= begins_at:
                continue
            if table == "outbox.message" and life.envelopes:
                continue
            may_be_gone = may_be_gone or table == "outbox.message"
            begins = (
                "is empty" if begins_at is None else f"begins {write_moment(begins_at)}"
            )
            texts.append(f"{table}{where} {begins}; older rows may have been dropped")
    return tuple(texts), may_be_gone


def _elsewhere(life: Life, causes: Sequence[Life]) -> Iterator[str]:
    """Yield what another database records, as far as these ones show that there is."""
    if life.steps and not life.envelopes:
        yield "its outbox"
    for cause in causes:
        if not cause.envelopes:
            yield f"the outbox of {cause.id}, which led to it"
    is_shown = any(it.consumer and it.source[:6] == "inbox." for it in life.steps)
    if life.published_at is not None and not is_shown:
        yield "what consumers did with it, if anything"


def _low_water(
    connection: AdministrationConnection, tables: Sequence[str]
) -> list[tuple[str, datetime | None]]:
    cursor = connection.execute(
        load("outbox", "list_low_water_marks"), {"tables": list(tables)}
    )
    return cursor.fetchall()


@contextmanager
def _planned_for_one_message(databases: Databases) -> Iterator[None]:
    """Open a transaction in each database, with settings that end with it."""
    with ExitStack() as transactions:
        for connection in databases.values():
            transactions.enter_context(connection.transaction())
            connection.execute(_PLAN)
        yield


def read_id(text: str) -> UUID:
    """Read the id of a message.

    Raises:
        ConfigError: it isn't a UUID.
    """
    try:
        return UUID(text)
    except ValueError:
        raise ConfigError(
            f"id {shorten(text)}: not a UUID; receipts for ids of other producers are"
            " in inbox.foreign_receipt, their dead letters in pillarbox dead-letters"
            " list"
        ) from None


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


def write_moment(at: datetime | None) -> str:
    """Write a moment in UTC, to the millisecond."""
    return "unknown" if at is None else f"{at.astimezone(UTC):%F %T.%f}"[:-3]
