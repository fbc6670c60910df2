"""The processes of the demo: real relays and consumers, started and killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from inbox.demo.broker import Broker
from inbox.demo.orders import TENANT_VARIABLE
from outbox.cli.command import BROKER_VARIABLE, DATABASE_VARIABLE
from outbox.errors import OutboxError

# -P: the working directory may have a module of the same name as ours.
_PILLARBOX: Final = (sys.executable, "-P", "-m", "pillarbox")
_START_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 30
_TICK: Final = 0.05
_LAST_LINES: Final = 15


class Processes:
    """Starts pillarbox's commands as an operator would; `stop_all` ends them.

    They log to files in `logs`.
    """

    def __init__(
        self, database: str, broker: Broker, logs: Path, *, tenant: str
    ) -> None:
        self._broker = broker
        self._environment = {
            **os.environ,
            DATABASE_VARIABLE: database,
            TENANT_VARIABLE: tenant,
        }
        self._logs = logs
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *arguments: str) -> int:
        """Start a command under a name; return its pid."""
        with (self._logs / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*_PILLARBOX, *arguments],
                env=self._environment_of(arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C reaches only the demo, which stops them cleanly.
                start_new_session=True,
            )
        self._running[name] = process
        return process.pid

    def run(self, *arguments: str) -> str:
        """Run a command to its end; return its output.

        Raises:
            OutboxError: the command failed.
        """
        ended = subprocess.run(
            [*_PILLARBOX, *arguments],
            env=self._environment_of(arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode != 0:
            raise OutboxError(f"{' '.join(arguments)}: {ended.stdout}{ended.stderr}")
        return ended.stdout.strip()

    def _environment_of(self, arguments: tuple[str, ...]) -> Mapping[str, str]:
        of_relay = "relay" in arguments
        url = self._broker.url if of_relay else self._broker.source_url
        return {**self._environment, BROKER_VARIABLE: url}

    def write(self, name: str, text: str) -> Path:
        """Write a file beside the logs that only this user can read."""
        path = self._logs / name
        path.touch(mode=0o600)
        path.write_text(text)
        return path

    def wait_for(self, name: str, text: str) -> None:
        """Wait until a process has logged `text`.

        Raises:
            OutboxError: it hasn't.
        """
        deadline = time.monotonic() + _START_SECONDS
        while text not in self.log(name):
            if self._running[name].poll() is not None or time.monotonic() > deadline:
                raise OutboxError(f"{name} doesn't start: {self.log(name)[-2000:]}")
            time.sleep(_TICK)

    def log(self, name: str) -> str:
        """Return the log of a process so far."""
        return (self._logs / f"{name}.log").read_text(encoding="utf-8")

    def last_lines(self) -> str:
        """Return the end of each log."""
        ends = (
            f"--- {log.name}\n" + "\n".join(log.read_text().splitlines()[-_LAST_LINES:])
            for log in sorted(self._logs.glob("*.log"))
        )
        return "\n".join(ends)

    def kill(self, name: str) -> None:
        """End a process with SIGKILL: it can't clean up."""
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def ended(self) -> list[str]:
        """Return the names of processes that ended without being asked to."""
        running = self._running.items()
        return [name for name, process in running if process.poll() is not None]

    def logged(self, name: str, event: str) -> int:
        """Count an event in the log of a process."""
        return self.log(name).count(f" {event} ")

    def stop_all(self) -> dict[str, int]:
        """Stop the processes with SIGTERM, and return the exit status of each."""
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)
        statuses = {}
        try:
            for name, process in self._running.items():
                try:
                    statuses[name] = process.wait(_STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    statuses[name] = process.wait()
        finally:
            # Also after a second Ctrl-C.
            for process in self._running.values():
                process.kill()
            self._running.clear()
        return statuses
