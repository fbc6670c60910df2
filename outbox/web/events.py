"""Events of the page."""

import logging
from dataclasses import dataclass

from pillarbox.outbox.events import Event


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
