"""The calls of handlers in progress, and those that take longer than they should."""

import asyncio
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pillarbox.inbox.events import HandlerOverdue
from pillarbox.inbox.handlers.registration import Registered
from pillarbox.inbox.handlers.routes import name_of
from pillarbox.inbox.handlers.signature import Takes
from pillarbox.inbox.idle import DEFAULT_MAX_IDLE
from pillarbox.outbox.events import Observer
from pillarbox.outbox.message import Message

_LONG: Final = 5.0
"""Seconds after which a call is shown; also what a handler may take to be cancelled."""
_AGAIN: Final = 1.0
"""Seconds between two looks at all calls."""


@dataclass(slots=True, eq=False)
class Call:
    """A call of a handler, which is overdue after `limit` seconds; None: never.

    Attributes:
        began: None until the database has answered, and the handler itself is called.
    """

    handler: str
    message: Message
    limit: float | None
    began: float | None = None
    is_overdue: bool = False

    @property
    def seconds(self) -> float:
        """How long the handler has been running."""
        return 0.0 if self.began is None else time.monotonic() - self.began


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
        self._checks: asyncio.AbstractEventLoop | None = None
        """The event loop that will call `_check`, if any."""

    def begin(self, handler: Registered, message: Message) -> Call:
        """Note that a handler is called, with a batch that begins with the message."""
        limits = [] if handler.takes is Takes.JOB else [self._least]
        if (own := handler.terms.time_limit) is not None:
            limits.append(own.total_seconds() + _LONG)
        limit = max(limits, default=None)
        began = time.monotonic() if handler.takes is Takes.JOB else None
        call = Call(name_of(handler), message, limit, began)
        self._calls[call] = None
        self._check_later()
        return call

    def end(self, call: Call) -> None:
        """Note that the call has ended."""
        del self._calls[call]

    def measure(self) -> dict[str, Any]:
        """Return the fields of `ProcessMeasured`, if a call has taken long."""
        shown = [it for it in self._calls if it.is_overdue or it.seconds >= _LONG]
        if not shown:
            return {}
        call = min(shown, key=lambda it: not it.is_overdue)
        since = datetime.now(UTC) - timedelta(seconds=call.seconds)
        return {
            "running_id": call.message.id,
            "running_handler": call.handler,
            "running_since": since,
            "running_due": call.limit and since + timedelta(seconds=call.limit),
        }

    def _check_later(self) -> None:
        # A timer for each call would cost more than all else that is noted here.
        loop = asyncio.get_running_loop()
        if self._checks is not loop:
            self._checks = loop
            loop.call_later(_AGAIN, self._check)

    def _check(self) -> None:
        self._checks = None
        for call in self._calls:
            seconds, limit = call.seconds, call.limit
            if limit is None or seconds < limit or call.is_overdue:
                continue
            call.is_overdue = True
            self.notify(
                HandlerOverdue.of(
                    self._consumer,
                    call.message,
                    handler=call.handler,
                    seconds=seconds,
                )
            )
        if self._calls:
            self._check_later()
