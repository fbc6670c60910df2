"""The parts of outbox and inbox that repairs need, loaded by entry points."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Final
from uuid import UUID

from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.dead_letters.inspect import OnDiscard
from pillarbox.outbox.dead_letters.retry import Retrier
from pillarbox.outbox.dead_letters.schedule import RetrySchedule
from pillarbox.outbox.dead_letters.statement import Schema
from pillarbox.outbox.events import Observer

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
    """The differences between the outbox and the inbox.

    Attributes:
        lacks: returns what is missing to retry its dead letters; None if nothing is.
        open_retrier: opens what retries them; the observer receives its events.
    """

    schema: Schema
    lacks: Callable[[RetryOptions], str | None]
    open_retrier: Callable[
        [RetryOptions, Observer], AbstractAsyncContextManager[Retrier]
    ]
    on_discard: OnDiscard | None = None
    jobs: Jobs | None = None


def load_sides(only: str | None) -> list[Side]:
    """Load both sides, the outbox first, or only the named one."""
    names = ("outbox", "inbox") if only is None else (only,)
    return [_points()[name].load() for name in names]


@cache
def _points() -> Mapping[str, EntryPoint]:
    # Cached, since the search reads the metadata of every installed distribution.
    return {point.name: point for point in entry_points(group=GROUP)}
