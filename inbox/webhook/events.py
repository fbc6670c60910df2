"""What the endpoint of web hooks tells its observers, beside `inbox.events`."""

import logging
from dataclasses import dataclass

from inbox.events import DeliveryEvent
from outbox.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookRefused(Event):
    """A request was no good, and was told so: it is not to come again."""

    level = logging.WARNING

    consumer: str
    status: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookFailed(DeliveryEvent):
    """A message could not be handled now; nothing is left of it, and it comes again.

    `stacktrace` is what its handler raised, for the first time in this process.
    """

    level = logging.WARNING

    status: int
    reason: str
    stacktrace: str | None = None
