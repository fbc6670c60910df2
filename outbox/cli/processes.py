"""One command in several processes: a parent starts them, and restarts dead ones.

Two pipes connect the parent with all of them. When it closes the first one, they drain;
that also happens if it is killed. It sends them no signals, so a process that gets one
itself, from a terminal or a service manager, drains once. Through the second pipe they
report that they run, where their endpoints are, and that they have started. One that
doesn't run yet, because it imports the application, is ended by a signal.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from pillarbox.outbox.cli.command import CHILD_VARIABLE, FAILED
from pillarbox.outbox.errors import one_line
from pillarbox.outbox.events import Event, Observers
from pillarbox.outbox.gather import gather
from pillarbox.outbox.observability.endpoints import listening
from pillarbox.outbox.observability.heartbeat import HEARTBEAT_VARIABLE, beating
from pillarbox.outbox.observability.logging import LogEvents

if TYPE_CHECKING:
    from pillarbox.outbox.observability.prometheus import PrometheusEvents

LOOPBACK: Final = "127.0.0.1:0"
"""Where the parent asks for the endpoints of a process."""
# -P: the working directory may have a module of the same name as ours.
_PILLARBOX: Final = (sys.executable, "-P", "-m", "pillarbox")
_FIRST_DELAY: Final = 1.0
_MAX_DELAY: Final = 30.0
_STABLE: Final = 60.0
"""A process that ends after this many seconds is restarted after the first delay."""
_SIGNALLED: Final = 128
_STARTED: Final = "started"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStarted(Event):
    """A process was started, as one of several that share the work.

    Attributes:
        process: its number, from 1, which metrics have as a label.
        pid: its id, which its log lines have in brackets.
    """

    process: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnded(Event):
    """One of several processes ended on its own, and will be started again.

    Attributes:
        process: its number, from 1, which metrics have as a label.
        pid: its id; None if it could not be started.
        reason: its exit status, or the signal that killed it.
        seconds_until_start: doubles each time, up to 30 seconds.
    """

    level = logging.WARNING
    advice = "find the cause in its last lines; after SIGKILL, in the kernel's log"

    process: int
    pid: int | None
    reason: str
    seconds_until_start: float


@dataclass(frozen=True, slots=True)
class Parent:
    """The process that started this one as one of several.

    Attributes:
        number: the number of this process.
        stop: the end of the first pipe.
        report: the end of the second one.
    """

    number: int
    stop: int
    report: int

    @classmethod
    def take(cls) -> Self | None:
        """Return the parent of this process; None if it has none, or was asked before.

        Processes that handlers start don't inherit it.
        """
        if (passed := os.environ.pop(CHILD_VARIABLE, None)) is None:
            return None
        parent = cls(*map(int, passed.split()))
        os.set_inheritable(parent.stop, False)
        os.set_inheritable(parent.report, False)
        return parent

    async def wait_for_stop(self) -> None:
        """Return when the parent stops, or is gone."""
        loop, closed = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.stop, closed.set)
        try:
            await closed.wait()
        finally:
            loop.remove_reader(self.stop)

    def report_run(self, address: str | None) -> None:
        """Report that this process drains when told, and where its endpoints are."""
        self._report(address or "")

    def report_start(self) -> None:
        """Report that this process has started."""
        self._report(_STARTED)

    def _report(self, what: str) -> None:
        with suppress(OSError):
            os.write(self.report, f"{self.number} {what}\n".encode())


class Processes:
    """Runs the command of this process in several others; for one run.

    When the first one has started, the others are started. So a wrong configuration is
    reported once.

    Args:
        count: how many.
        listen: the address that serves the endpoints of all.
        exported: the metrics of this process itself; None if they aren't served.
        restarts: whether one that ends is started again.
    """

    def __init__(
        self,
        count: int,
        listen: str | None,
        exported: "PrometheusEvents | None",
        *,
        restarts: bool,
    ) -> None:
        self._addresses: dict[int, str | None] = dict.fromkeys(range(1, count + 1))
        self._listen = listen
        self._exported = exported
        self._restarts = restarts
        metrics = [] if exported is None else [exported]
        self._notify = Observers([LogEvents(), *metrics]).notify
        self._has_started: set[int] = set()
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._can_drain: set[int] = set()
        self._first_began = asyncio.Event()
        self._stopping = asyncio.Event()
        self._killed_by = 0
        self._stop_read, self._stop_write = os.pipe()
        self._report_read, self._report_write = os.pipe()
        os.set_blocking(self._report_read, False)

    async def run(self) -> int:
        """Run them until all have ended; return the highest exit status.

        SIGTERM or SIGINT drains them, a second one kills them.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        loop.add_reader(self._report_read, self._read_reports)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(beating())
            if self._listen is not None and self._exported is not None:
                from pillarbox.outbox.observability.gathered import Gathered

                gathered = Gathered(
                    self._addresses, self._exported.registry, self._stopping.is_set
                )
                serving = listening(self._listen, gathered.handlers())
                await stack.enter_async_context(serving)
            statuses = await gather(map(self._keep, self._addresses))
        return _SIGNALLED + self._killed_by if self._killed_by else max(statuses)

    def _signalled(self, number: int) -> None:
        if self._stopping.is_set():
            self._killed_by = number
            for process in self._running.values():
                process.kill()
        else:
            self._stop()

    def _stop(self) -> None:
        if not self._stopping.is_set():
            os.close(self._stop_write)
            for number in self._running.keys() - self._can_drain:
                self._running[number].terminate()  # its imports may take long
        self._stopping.set()
        self._first_began.set()

    def _read_reports(self) -> None:
        for line in os.read(self._report_read, 4096).decode().splitlines():
            number, _, what = line.partition(" ")
            if what == _STARTED:
                self._has_started.add(int(number))
                self._first_began.set()
            else:
                self._can_drain.add(int(number))
                self._addresses[int(number)] = what or None

    async def _keep(self, number: int) -> int:
        """Keep one process running; return its last exit status."""
        if number > 1:
            await self._first_began.wait()
        delay, status = _FIRST_DELAY, 0
        while not self._stopping.is_set():
            began, pid = time.monotonic(), None
            try:
                process = await self._start(number)
                pid = process.pid
                code = await self._end_of(number, process)
                if code == -signal.SIGTERM and self._stopping.is_set():
                    code = 0
                reason = _reason(code)
                status = code if code >= 0 else _SIGNALLED - code
            except OSError as error:
                status, reason = os.EX_OSERR, one_line(error)
            self._addresses[number] = None
            if status == FAILED and number not in self._has_started:
                self._stop()  # it says itself why it can't start
            self._first_began.set()
            if self._stopping.is_set() or not self._restarts:
                break
            if time.monotonic() - began > _STABLE:
                delay = _FIRST_DELAY
            self._notify(
                ProcessEnded(
                    process=number, pid=pid, reason=reason, seconds_until_start=delay
                )
            )
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)
            delay, status = min(2 * delay, _MAX_DELAY), 0
        return status

    async def _start(self, number: int) -> asyncio.subprocess.Process:
        passed = self._stop_read, self._report_write
        environment = {
            **os.environ,
            CHILD_VARIABLE: f"{number} {passed[0]} {passed[1]}",
        }
        environment.pop(HEARTBEAT_VARIABLE, None)
        process = await asyncio.create_subprocess_exec(
            *_PILLARBOX, *sys.argv[1:], env=environment, pass_fds=passed
        )
        self._notify(ProcessStarted(process=number, pid=process.pid))
        return process

    async def _end_of(self, number: int, process: asyncio.subprocess.Process) -> int:
        """Return the exit status of a process, or the negative number of a signal."""
        self._running[number] = process
        if self._killed_by:
            process.kill()
        elif self._stopping.is_set():
            process.terminate()
        code = await process.wait()
        del self._running[number]
        self._can_drain.discard(number)
        return code


def _reason(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:  # not all signals have a name
        return f"exit status {code}" if code >= 0 else f"signal {-code}"
