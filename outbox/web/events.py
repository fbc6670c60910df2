"""Events of the page."""

import logging
from dataclasses import dataclass
from uuid import UUID

from outbox.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class WebStarted(Event):
    """The page is being served."""

    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginRefused(Event):
    """Someone tried to log in with an unknown token."""

    about = ()

    client: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRequested(Event):
    """A viewer asked the page to retry or discard dead letters."""

    id: UUID
    kind: str
    asked_by: str
    expected: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationEnded(Event):
    """An operation that a viewer requested has ended."""

    id: UUID
    kind: str
    asked_by: str
    state: str
    succeeded: int
    failed: int
    skipped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCancelRequested(Event):
    """A viewer asked the page to cancel a job.

    Attributes:
        state: the job's state afterwards.
    """

    id: UUID
    consumer: str
    asked_by: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailed(Event):
    """A request to the page failed because of an error in pillarbox."""

    level = logging.WARNING
    about = ("path", "reason")
    advice = (
        "report the error with its stack trace, or fix it if it is in your own hook"
    )

    path: str
    reason: str
    stacktrace: str
