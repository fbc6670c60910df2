"""The calls of handlers in progress, and those that take longer than they should."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from inbox.events import HandlerOverdue
from inbox.handlers.routes import name_of
from inbox.idle import DEFAULT_MAX_IDLE
from outbox.events import Observer
from outbox.message import Message

TIME_LIMIT: Final = "__time_limit__"
"""The attribute of prepared handlers that have one."""

_LONG: Final = 5.0
"""Seconds after which a call is shown; also what a handler may take to be cancelled."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call of a handler.

    Attributes:
        limit: the seconds after which it is overdue; None: never.
    """

    handler: str
    messages: Sequence[Message]
    began: float
    limit: float | None

    @property
    def is_overdue(self) -> bool:
        """Whether it takes longer than it should."""
        return self.limit is not None and time.monotonic() - self.began >= self.limit

    def fields(self) -> dict[str, Any]:
        """Return the fields of `ProcessMeasured`."""
        since = datetime.now(UTC) - timedelta(seconds=time.monotonic() - self.began)
        due = None if self.limit is None else since + timedelta(seconds=self.limit)
        return {
            "running_id": self.messages[0].id,
            "running_handler": self.handler,
            "running_since": since,
            "running_due": due,
        }


class Calls:
    """The calls that an executor makes, oldest first. For one event loop.

    A call is overdue after `max_idle`, when the server has ended an idle transaction,
    or after the handler's time limit if that is longer; a job only after its own.
    """

    def __init__(self, consumer: str, max_idle: timedelta | None) -> None:
        self.notify: Observer = lambda _: None
        self._consumer = consumer
        self._least = (max_idle or DEFAULT_MAX_IDLE).total_seconds()
        self._timers: dict[Call, asyncio.TimerHandle | None] = {}

    def begin(
        self, handler: Any, messages: Sequence[Message], *, is_job: bool = False
    ) -> Call:
        """Note that a handler is called."""
        limits = [] if is_job else [self._least]
        if (own := getattr(handler, TIME_LIMIT, None)) is not None:
            limits.append(own.total_seconds() + _LONG)
        limit = max(limits, default=None)
        call = Call(name_of(handler), messages, time.monotonic(), limit)
        later = asyncio.get_running_loop().call_later
        timer = None if limit is None else later(limit, self._report, call)
        self._timers[call] = timer
        return call

    def end(self, call: Call) -> None:
        """Note that the call has ended."""
        if (timer := self._timers.pop(call)) is not None:
            timer.cancel()

    def longest(self) -> Call | None:
        """Return the oldest overdue call, or else the oldest that has taken long."""
        now = time.monotonic()
        shown = [it for it in self._timers if it.is_overdue or now - it.began >= _LONG]
        return min(shown, key=lambda it: not it.is_overdue, default=None)

    def _report(self, call: Call) -> None:
        message = call.messages[0]
        self.notify(
            HandlerOverdue(
                consumer=self._consumer,
                id=message.id,
                topic=message.topic,
                key=message.key,
                traceparent=message.headers.get("traceparent"),
                messages=len(call.messages),
                handler=call.handler,
                seconds=time.monotonic() - call.began,
            )
        )
