"""What the page may show and do."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeAlias

from outbox.administration.sides import RetryOptions
from outbox.events import Observer

Redact: TypeAlias = Callable[[str], str]
"""Receives a text from a message, and returns the text to show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the page may show and do.

    Attributes:
        database: the URL of the database. Nothing is shown that its role can't read.
        allow_actions: whether anything can be changed at all.
        show_payloads: whether payloads, headers and stack traces are shown to viewers
            who may see them.
        redact: applied to every payload, header value and stack trace before it is
            shown. If it raises, the text is not shown.
        retry: how to retry dead letters; None if they can't be retried here.
        refresh: how often an open page looks for changes.
        observers: observers that receive the page's events.
        key: signs forms and dry runs. If several processes serve the page, give all of
            them the same random 32 bytes; the default is new in each process.
    """

    database: str
    allow_actions: bool = False
    show_payloads: bool = False
    redact: Redact = field(default=lambda text: text, repr=False)
    retry: RetryOptions | None = None
    refresh: timedelta = timedelta(seconds=2)
    observers: tuple[Observer, ...] = ()
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
