"""Events about dead letters."""

from dataclasses import dataclass
from uuid import UUID

from pillarbox.outbox.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterSucceeded(Event):
    """A retry published or handled a dead letter.

    Attributes:
        schema: outbox or inbox.
        id: the id of the dead letter.
    """

    schema: str
    id: UUID
    message_id: str
    topic: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterFailed(Event):
    """A retry failed; the dead letter is still PENDING.

    Attributes:
        schema: outbox or inbox.
        id: the id of the dead letter.
        retry_count: how often it was retried.
        reason: the error.
    """

    about = ("schema", "topic", "reason")

    schema: str
    id: UUID
    message_id: str
    topic: str
    retry_count: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRunEnded(Event):
    """The schedule has retried the dead letters that were due.

    Attributes:
        schema: outbox or inbox.
        skipped: dead letters that another process was retrying, or had settled.
        seconds: how long the run took.
    """

    schema: str
    succeeded: int
    failed: int
    skipped: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRunFailed(Event):
    """A run of the schedule failed, for example because the broker was unavailable.

    The remaining dead letters are retried in the next run.

    Attributes:
        reason: the error.
    """

    schema: str
    reason: str
