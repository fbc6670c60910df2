"""The base class of the brokers' private servers: it starts and stops a process."""

import os
import shutil
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from typing_extensions import override

from pillarbox.outbox.errors import ConfigError, OutboxError
from pillarbox.outbox.testing import cluster
from pillarbox.outbox.testing.lifetime import free_port, wait_until, watched

__all__ = ["PrivateServer", "chosen_folders", "find_program", "use_chosen_postgres"]


def chosen_folders() -> list[Path]:
    """Return the folders of PILLARBOX_TEST_SERVERS, whose servers the tests use.

    Raises:
        ConfigError: one of them doesn't exist.
    """
    named = os.environ.get("PILLARBOX_TEST_SERVERS", "").split(os.pathsep)
    folders = [Path(folder) for folder in named if folder]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"PILLARBOX_TEST_SERVERS: there is no folder {folder}")
    return folders


def use_chosen_postgres() -> None:
    """Use the chosen PostgreSQL, if there is one, not the newest of this machine."""
    if found := [it for it in chosen_folders() if (it / "initdb").exists()]:
        cluster.server_directories = lambda: iter(found)


def find_program(*names: str, package: str, places: str = "") -> str:
    """Return the first of these programs that is there.

    It is looked for in the folders of PILLARBOX_TEST_SERVERS, in `places`, on PATH, and
    where Debian installs servers, which PATH may lack.

    Raises:
        ConfigError: none is there.
    """
    path = os.environ.get("PATH", os.defpath)
    known = f"{places}:{path}:/usr/sbin:/usr/local/sbin".split(os.pathsep)
    for folder in [*chosen_folders(), *filter(None, known)]:
        for name in names:
            if (found := shutil.which(name, path=str(folder))) is not None:
                return found
    raise ConfigError(
        f"{names[0]} is not on PATH; install it (Debian: {package}) or pass the URL"
        " of a server"
    )


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

    @property
    def pid(self) -> int:
        """The process id."""
        return int(self.pid_file.read_text())

    def freeze(self) -> None:
        """Stop responding, but keep connections open."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        """Respond again after `freeze`."""
        os.kill(self.pid, signal.SIGCONT)

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
