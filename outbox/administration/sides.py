"""What repairs need from the outbox and the inbox, which are loaded by entry points."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Final, LiteralString
from uuid import UUID

from psycopg.rows import class_row

from outbox.administration.connection import AdministrationConnection
from outbox.dead_letters.inspect import OnDiscard
from outbox.dead_letters.retry import Retrier
from outbox.dead_letters.schedule import RetrySchedule
from outbox.dead_letters.statement import Schema
from outbox.events import Observer

GROUP: Final = "pillarbox.sides"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryOptions:
    """How to retry dead letters, as requested.

    Attributes:
        consumer: the consumer whose handlers are called, as `module:name`.
    """

    database: str
    broker: str | None
    codec: str | None
    consumer: str | None
    schedule: RetrySchedule | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """A message that was refused and waits for its next attempt.

    Attributes:
        key: the key that it blocks: later messages of that key wait, too. None if it
            waits alone.
        consumer: the consumer that refused it; None if a broker did.
        reader: the reader of the outbox whose broker refused it.
        available_at: when it is tried again.
        last_error: why it was refused, if that was stored.
    """

    key: str | None
    lane: int
    id: UUID
    topic: str
    consumer: str | None = None
    reader: str | None = None
    attempts: int
    created_at: datetime
    available_at: datetime
    last_error: str | None


@dataclass(frozen=True, slots=True)
class BlockedCount:
    """How many messages wait after a refusal."""

    keys: int
    without_key: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """A job of a long handler.

    Attributes:
        worker: the worker that runs it, or ran it last.
        worker_is_gone: whether the lease expired before the job ended.
    """

    message_id: UUID
    consumer: str
    state: str
    attempts: int
    topic: str | None
    key: str | None
    tenant: str | None
    worker: str | None
    worker_is_gone: bool
    reason: str | None
    queued_at: datetime
    started_at: datetime | None
    cancel_requested_at: datetime | None
    finished_at: datetime | None
    lease_until: datetime | None

    @property
    def since(self) -> datetime:
        """When the job entered its current state."""
        moments = {
            "queued": self.queued_at,
            "in_progress": self.started_at,
            "waiting": self.cancel_requested_at,
        }
        return moments.get(self.state, self.finished_at) or self.queued_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """The jobs of the long handlers of one side.

    Attributes:
        states: all states, the open ones first.
        open_states: the states of a job that has not ended.
        read: returns jobs of a consumer (None: of all) in some states, up to a number;
            open jobs first, then the newest.
        cancel: requests that the job of a message and a consumer be cancelled, with a
            reason; returns its state afterwards.
    """

    states: tuple[str, ...]
    open_states: tuple[str, ...]
    read: Callable[
        [AdministrationConnection, str | None, Sequence[str], int], Sequence[JobRow]
    ]
    cancel: Callable[[AdministrationConnection, UUID, str, str | None], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What differs between the outbox and the inbox.

    Attributes:
        lacks: returns what is missing to retry its dead letters; None if nothing is.
        open_retrier: opens what retries them; the observer receives its events.
        list_blocked: the statement that lists refused messages, oldest first.
        count_blocked: the statement that counts the keys that they block.
    """

    schema: Schema
    lacks: Callable[[RetryOptions], str | None]
    open_retrier: Callable[
        [RetryOptions, Observer], AbstractAsyncContextManager[Retrier]
    ]
    list_blocked: LiteralString
    count_blocked: LiteralString
    on_discard: OnDiscard | None = None
    jobs: Jobs | None = None

    def read_blocked(
        self, connection: AdministrationConnection, max_rows: int
    ) -> Sequence[Blocked]:
        """Return the refused messages, the oldest first."""
        with connection.cursor(row_factory=class_row(Blocked)) as cursor:
            cursor.execute(self.list_blocked, {"max_rows": max_rows})
            return cursor.fetchall()

    def read_blocked_count(self, connection: AdministrationConnection) -> BlockedCount:
        """Return the number of blocked keys, and of refused messages without a key."""
        with connection.cursor(row_factory=class_row(BlockedCount)) as cursor:
            (counted,) = cursor.execute(self.count_blocked)
        return counted


def load_sides(only: str | None) -> list[Side]:
    """Load both sides, the outbox first, or only the named one."""
    names = ("outbox", "inbox") if only is None else (only,)
    return [_points()[name].load() for name in names]


@cache
def _points() -> Mapping[str, EntryPoint]:
    # Cached, since the search reads the metadata of every installed distribution.
    return {point.name: point for point in entry_points(group=GROUP)}
