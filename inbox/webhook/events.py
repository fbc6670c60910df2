"""Events of the webhook endpoint, in addition to those of `pillarbox.inbox.events`."""

from dataclasses import dataclass

from pillarbox.inbox.events import DeliveryEvent
from pillarbox.outbox.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookRefused(Event):
    """A request was refused with a 4xx status; the sender must not repeat it."""

    about = ("consumer", "status", "reason")

    consumer: str
    status: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookFailed(DeliveryEvent):
    """A message could not be handled and was rolled back; the sender sends it again.

    Attributes:
        stacktrace: the stack trace of the handler's error; None if this process has
            already reported it.
    """

    about = ("consumer", "topic", "reason")

    status: int
    reason: str
    stacktrace: str | None = None
