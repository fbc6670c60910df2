"""A command waits at its start for its servers, the schema and its URLs' files."""

import asyncio
import math
import os
import time
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Annotated, Any, Final, TypeAlias

from pillarbox.outbox.cli.command import FAILED, duration_option
from pillarbox.outbox.errors import (
    BrokerUnavailableError,
    DatabaseUnavailableError,
    OutboxError,
    PrerequisiteError,
    RefusedError,
)
from pillarbox.outbox.events import Event, StartDelayed
from pillarbox.outbox.gather import end
from pillarbox.outbox.observability.standard_error import write_error
from pillarbox.outbox.postgres.remedy import remedy_of
from pillarbox.outbox.retry import RECONNECT

Wait: TypeAlias = Annotated[
    timedelta | None,
    duration_option(
        help="How long to wait at the start for the database, its schema and the"
        " broker; 0s: not at all.",
        show_default="without limit",
    ),
]
_REMEDY: Final = "fix the reason, or correct the URL"
_NO_ANSWER: Final = (
    "--wait is over: the database or the broker accepts connections, but doesn't"
    " answer; restart it, or check the addresses in the URLs"
)
_GRACE: Final = 0.5
"""Seconds for which an attempt may exceed the limit."""
_PASSING: Final = (
    DatabaseUnavailableError,
    BrokerUnavailableError,
    PrerequisiteError,
)


class Start:
    """The start of a process, which is tried until it succeeds.

    Attributes:
        done: set when the process has started.
        stopping: set when it should end.
    """

    def __init__(self, wait: timedelta | None, notify: Callable[[Event], None]) -> None:
        self._limit = None if wait is None else wait.total_seconds()
        self._notify = notify
        self._reason = _NO_ANSWER
        self.done = asyncio.Event()
        self.stopping = asyncio.Event()

    async def run(self, process: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a process; while it can't start, try again unless that can't help.

        If `stopping` is set before it has started, it is cancelled.

        Raises:
            OutboxError: why it can't start, or ended.
        """
        began, failures = time.monotonic(), 0
        ending = None
        if self._limit:
            after = asyncio.get_running_loop().call_later
            ending = after(self._limit + _GRACE, self._give_up)
        stopped = asyncio.create_task(self.stopping.wait())
        try:
            while (error := await self._failure_of(process(), stopped)) is not None:
                waited = time.monotonic() - began
                left = math.inf if self._limit is None else self._limit - waited
                if left <= 0:
                    raise error
                failures, self._reason = failures + 1, str(error)
                seconds = timedelta(seconds=round(waited))
                remedy = _REMEDY
                if isinstance(error, DatabaseUnavailableError):
                    remedy = remedy_of(error)
                self._notify(
                    StartDelayed(reason=str(error), remedy=remedy, waited=seconds)
                )
                pause = RECONNECT.delay(failures).total_seconds()
                await asyncio.wait({stopped}, timeout=min(pause, left))
                if stopped.done():
                    return
        finally:
            await end([stopped])
            if ending is not None:
                ending.cancel()

    def _give_up(self) -> None:
        """Exit at once if a try hangs; its threads couldn't be cancelled."""
        if not self.done.is_set():
            write_error(f"pillarbox: {self._reason}\n")
            os._exit(FAILED)

    async def _failure_of(
        self, process: Coroutine[Any, Any, None], stopped: asyncio.Task[Any]
    ) -> OutboxError | None:
        """Run the process; return why it can't start yet; None when it has ended."""
        running = asyncio.create_task(process)
        try:
            await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if running.done() or self.done.is_set():
                await running
        except _PASSING as error:
            if self.done.is_set() or isinstance(error, RefusedError):
                raise
            return error
        finally:
            await end([running])
        return None
