"""The settings of the page."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from pillarbox.outbox.administration.sides import RetryOptions
from pillarbox.outbox.events import Observer

Redact: TypeAlias = Callable[[str], str]
"""Receives a text from a message, and returns the text to show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the page may show and do.

    Attributes:
        database: the URL of the database. Nothing is shown that its role can't read.
        others: the URLs of other services' databases, which get pages like this one's,
            without retries; the lives of messages are read in all of them.
        redact: applied to every payload, header value and stack trace before it is
            shown. If it raises, the text is not shown.
        broker, codec: to retry dead letters of the outbox; the codec as `module:name`.
        consumer: whose handlers retry dead letters of the inbox, as `module:name`.
        observers: observers that receive the page's events.
    """

    database: str
    others: tuple[str, ...] = ()
    redact: Redact = field(default=lambda text: text, repr=False)
    broker: str | None = None
    codec: str | None = None
    consumer: str | None = None
    observers: tuple[Observer, ...] = ()

    @property
    def retry(self) -> RetryOptions:
        """How to retry dead letters."""
        return RetryOptions(
            database=self.database,
            broker=self.broker,
            codec=self.codec,
            consumer=self.consumer,
            schedule=None,
        )
