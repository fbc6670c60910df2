"""The calls of handlers in progress, and those that take longer than they should."""

import asyncio
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from inbox.events import HandlerOverdue
from inbox.handlers.registration import Registered
from inbox.handlers.routes import name_of
from inbox.handlers.signature import Takes
from inbox.idle import DEFAULT_MAX_IDLE
from outbox.events import Observer
from outbox.message import Message

_LONG: Final = 5.0
"""Seconds after which a call is shown; also what a handler may take to be cancelled."""


@dataclass(slots=True, eq=False)
class Call:
    """A call of a handler, which is overdue after `limit` seconds; None: never."""

    handler: str
    message: Message
    began: float
    limit: float | None
    timer: asyncio.TimerHandle | None = None
    is_overdue: bool = False


class Calls:
    """The calls that an executor makes. For one event loop.

    A call is overdue after `max_idle`, when the server has ended an idle transaction,
    or after the handler's time limit if that is longer; a job only after its own.
    """

    def __init__(self, consumer: str, max_idle: timedelta | None) -> None:
        self.notify: Observer = lambda _: None
        self._consumer = consumer
        self._least = (max_idle or DEFAULT_MAX_IDLE).total_seconds()
        self._calls: dict[Call, None] = {}  # oldest first

    def begin(self, handler: Registered, message: Message) -> Call:
        """Note that a handler is called, with a batch that begins with the message."""
        limits = [] if handler.takes is Takes.JOB else [self._least]
        if (own := handler.terms.time_limit) is not None:
            limits.append(own.total_seconds() + _LONG)
        limit = max(limits, default=None)
        call = Call(name_of(handler), message, time.monotonic(), limit)
        if limit is not None:
            loop = asyncio.get_running_loop()
            call.timer = loop.call_later(limit, self._report, call)
        self._calls[call] = None
        return call

    def end(self, call: Call) -> None:
        """Note that the call has ended."""
        del self._calls[call]
        if call.timer is not None:
            call.timer.cancel()

    def measure(self) -> dict[str, Any]:
        """Return the fields of `ProcessMeasured`, if a call has taken long."""
        now = time.monotonic()
        shown = [it for it in self._calls if it.is_overdue or now - it.began >= _LONG]
        if not shown:
            return {}
        call = min(shown, key=lambda it: not it.is_overdue)
        since = datetime.now(UTC) - timedelta(seconds=now - call.began)
        return {
            "running_id": call.message.id,
            "running_handler": call.handler,
            "running_since": since,
            "running_due": call.limit and since + timedelta(seconds=call.limit),
        }

    def _report(self, call: Call) -> None:
        call.is_overdue = True
        self.notify(
            HandlerOverdue.of(
                self._consumer,
                call.message,
                handler=call.handler,
                seconds=time.monotonic() - call.began,
            )
        )
