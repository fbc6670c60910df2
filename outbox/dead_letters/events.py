"""What is told of retried dead letters."""

import logging
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

from outbox.dead_letters.letter import Status
from outbox.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterSucceeded(Event):
    """A retry brought a dead letter to where it was to go."""

    schema: str
    id: UUID
    message_id: str
    topic: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterFailed(Event):
    """A retry failed; the dead letter is still PENDING."""

    level = logging.WARNING

    schema: str
    id: UUID
    message_id: str
    topic: str
    retry_count: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRunEnded(Event):
    """The schedule retried what was due."""

    schema: str
    succeeded: int
    failed: int
    skipped: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRunLeft(Event):
    """Another replica had the schedule's turn."""

    level = logging.DEBUG

    schema: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRunBroken(Event):
    """The database or the broker was away; what is due waits for the next turn."""

    level = logging.WARNING

    schema: str
    reason: str


class DeadLetterGroup(NamedTuple):
    """Those of one origin in one state; `seconds` is the age of the oldest."""

    origin: str
    status: Status
    letters: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLettersMeasured(Event):
    """The dead letters were counted."""

    level = logging.DEBUG

    schema: str
    groups: tuple[DeadLetterGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLettersUnknown(Event):
    """The dead letters could not be counted."""

    level = logging.WARNING

    schema: str
    reason: str
