"""What the private servers of brokers have in common: a process, and its life."""

import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from outbox.errors import OutboxError
from outbox.testing.lifetime import free_port, wait_until, watched

__all__ = ["PrivateServer"]


class PrivateServer(ABC):
    """One server: its directory, its port and its life. Not for two threads at once.

    Each kind says by `command` how it is started, and by `answers` when it is there.
    """

    seconds_to_start: float = 60

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> Sequence[str | Path]:
        """Prepare a start, and give the program and its arguments."""

    @abstractmethod
    def answers(self) -> bool:
        """Return whether it is ready for clients."""

    def environment(self) -> Mapping[str, str] | None:
        """Return the environment it runs in; None for ours."""
        return None

    @property
    def pid_file(self) -> Path:
        """Where the process id of the running server stands."""
        return self.directory / "server.pid"

    def start(self) -> None:
        """Start, and return when it answers.

        Raises:
            OutboxError: it ended, or doesn't answer in time; with what it printed.
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
                # Control-C in the terminal is for us, who then end it in order.
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
            raise OutboxError(f"{command[0]} doesn't answer: {report[-2000:]}")

    def stop(self) -> None:
        """Stop in order, and return when it is over."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Stop as a crash does."""
        self._end(signal.SIGKILL)

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Run for as long as the block, or until this process is gone."""
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
