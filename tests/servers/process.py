"""The base class of the brokers' private servers: it starts and stops a process."""

import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from typing_extensions import override

from outbox.errors import OutboxError
from outbox.testing.lifetime import free_port, wait_until, watched

__all__ = ["PrivateServer"]


class PrivateServer(ABC):
    """One server process with its directory and port. Not thread-safe.

    A subclass defines how to start it (`command`) and when it is ready (`answers`).
    """

    seconds_to_start: float = 60

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs to use the server, which can't end it."""
        return self.__dict__ | {"_process": None}

    @abstractmethod
    def command(self) -> Sequence[str | Path]:
        """Prepare a start, and return the program and its arguments."""

    @abstractmethod
    def answers(self) -> bool:
        """Return whether the server is ready for clients."""

    def environment(self) -> Mapping[str, str] | None:
        """Return the server's environment; None to inherit that of this process."""
        return None

    @property
    def pid_file(self) -> Path:
        """The file with the running server's process id."""
        return self.directory / "server.pid"

    def start(self) -> None:
        """Start the server, and return when it is ready.

        Raises:
            OutboxError: the server exited, or wasn't ready in time; the message
                contains its output.
        """
        command = self.command()
        log = self.directory / "server.log"
        with log.open("wb") as output:
            self._process = process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.directory,
                env=self.environment(),
                # Control-C in the terminal must reach only this process, which then
                # stops the server.
                start_new_session=True,
            )
        self.pid_file.write_text(str(process.pid))
        wait_until(
            lambda: process.poll() is not None or self.answers(),
            seconds=self.seconds_to_start,
        )
        if process.poll() is not None or not self.answers():
            self.kill()
            report = log.read_text(errors="replace")
            raise OutboxError(f"{command[0]} is not ready: {report[-2000:]}")

    def stop(self) -> None:
        """Stop with SIGTERM, and return when the process has ended."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Stop with SIGKILL, as in a crash."""
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """Stop it in the middle of its work."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it continue."""
        self._signal(signal.SIGCONT)

    def _signal(self, how: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(how)

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Run the server until the end of the block, or until this process ends."""
        with watched(self.directory, self.pid_file, signal.SIGKILL):
            try:
                self.start()
                yield self
            finally:
                self.kill()

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(timeout=60)
            self._process = None
        self.pid_file.unlink(missing_ok=True)
