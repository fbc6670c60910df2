"""Child processes with one log: each line has the name of its process before it."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from socket import socket
from typing import Any, Final, Self, TypeAlias

from pillarbox.outbox.errors import OutboxError

Show: TypeAlias = Callable[[str, str], None]

# -P: the working directory may have a module of the same name as ours.
PILLARBOX: Final = (sys.executable, "-P", "-m", "pillarbox")
DRAIN_SECONDS: Final = 30.0
_LONGEST_LINE: Final = 1 << 24
# Leads the group of all parts, and stops them when the pipe closes because this process
# has ended, even if it was killed.
_WATCHDOG: Final = "trap '' HUP INT TERM; cat >/dev/null; kill -INT 0"


def say(name: str, text: str) -> None:
    """Print one line of the log."""
    sys.stdout.write(f"{name:<9}| {text}\n")
    sys.stdout.flush()


class Part:
    """A running process.

    Args:
        show: is given its name and each line that it prints.

    Attributes:
        ended: its exit status, once its last line is shown.
    """

    def __init__(self, name: str, process: Process, show: Show) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._show = show
        self.ended = asyncio.create_task(self._follow())

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal and wait until it has ended; after a while, kill it."""
        self.send(how)
        done, _ = await asyncio.wait([self.ended], timeout=DRAIN_SECONDS)
        if not done:
            text = f"still runs after {DRAIN_SECONDS:g} s, and is killed"
            self._show(self.name, text)
            self.send(signal.SIGKILL)
        await self.ended

    async def _follow(self) -> int:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self._show(self.name, line.decode(errors="backslashreplace").rstrip())
        return await self._process.wait()


class Parts:
    """Starts processes; stops them after the block, those started first as the last.

    They end with this process, even if it is killed. Ctrl-C in the terminal doesn't
    reach them.

    Args:
        environment: variables of every process.
        show: is given the name of a process and each line that it prints; prints them
            by default.
        sockets: those that pillarbox's own commands inherit.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        show: Show | None = None,
        *,
        sockets: Collection[socket] = (),
    ) -> None:
        self._show = show or say
        self._pass_fds = [it.fileno() for it in sockets]
        self._environment = {**os.environ, **environment, "PYTHONUNBUFFERED": "1"}
        self._running: list[tuple[Part, signal.Signals]] = []
        self._watchdog: Process

    async def start(
        self,
        name: str,
        *command: str | Path,
        stop: signal.Signals = signal.SIGTERM,
        **settings: Any,
    ) -> Part:
        """Start a process.

        Args:
            stop: the signal that stops it.
            settings: further arguments of `Popen`.
        """
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            limit=_LONGEST_LINE,
            process_group=self._watchdog.pid,
            **{"env": self._environment, **settings},
        )
        part = Part(name, process, self._show)
        self._running.append((part, stop))
        return part

    async def pillarbox(self, name: str, *arguments: str) -> Part:
        """Start one of pillarbox's own commands."""
        return await self.start(name, *PILLARBOX, *arguments, pass_fds=self._pass_fds)

    async def run(self, *arguments: str) -> None:
        """Run one of pillarbox's own commands to its end.

        Raises:
            OutboxError: it failed.
        """
        part = await self.pillarbox(arguments[0], *arguments)
        if (status := await part.ended) != 0:
            raise OutboxError(
                f"pillarbox {' '.join(arguments)} ended with {status}; its last lines "
                "above say why"
            )

    async def __aenter__(self) -> Self:
        """Start the watchdog."""
        self._watchdog = await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", _WATCHDOG), stdin=PIPE, process_group=0, cwd="/"
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Stop every process."""
        await asyncio.gather(*(part.stop(how) for part, how in self._running[1:]))
        for part, how in self._running[:1]:
            await part.stop(how)
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.close()
        await self._watchdog.wait()
