"""A private NATS server with JetStream for tests, demo and benchmarks."""

import json
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outbox.errors import ConfigError, OutboxError
from outbox.testing.lifetime import free_port, private_directory, wait_until, watched

__all__ = ["NatsServer", "nats_server"]


class NatsServer:
    """One server: its directory, its port and its life. Its streams survive."""

    def __init__(
        self, program: str, directory: Path, settings: Mapping[str, Any]
    ) -> None:
        self._program = program
        self._directory = directory
        self._settings = dict(settings)
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it is, the same after each start."""
        return f"nats://127.0.0.1:{self._port}"

    @property
    def pid_file(self) -> Path:
        """Where the process id of the running server stands."""
        return self._directory / "nats.pid"

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Have other settings from the next start on."""
        self._settings = dict(settings)

    def start(self) -> None:
        """Start, and return when it answers."""
        own = {
            "host": "127.0.0.1",
            "port": self._port,
            "pid_file": str(self.pid_file),
            "log_file": str(self._directory / "nats.log"),
            "jetstream": {"store_dir": str(self._directory / "store")},
        }
        for name, value in self._settings.items():
            if name == "jetstream" and isinstance(value, dict):
                own["jetstream"] = own["jetstream"] | value  # type: ignore[operator]
            elif value is None:
                own.pop(name)
            else:
                own[name] = value
        configuration = self._directory / "nats.conf"
        # What it takes for its own syntax includes JSON.
        configuration.write_text(json.dumps(own))
        self._process = process = subprocess.Popen(
            [self._program, "-c", str(configuration)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        done = wait_until(
            lambda: process.poll() is not None or self._answers(), seconds=60
        )
        if not done or process.poll() is not None:
            self.kill()
            log = self._directory / "nats.log"
            report = log.read_text(errors="replace") if log.exists() else "no log"
            raise OutboxError(f"{self._program} doesn't answer: {report[-2000:]}")

    def stop(self) -> None:
        """Stop in order, and return when it is over."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Stop as a crash does."""
        self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(timeout=60)
            self._process = None
        self.pid_file.unlink(missing_ok=True)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._port), 1) as connection:
                return connection.recv(5) == b"INFO "
        except OSError:
            return False


@contextmanager
def nats_server(settings: Mapping[str, Any] | None = None) -> Iterator[NatsServer]:
    """Give a running server that is gone after the block, or with this process.

    `settings` are of nats-server.conf; None for `jetstream` turns it off.
    """
    # Root's PATH may lack /usr/sbin, where Debian has it.
    program = shutil.which("nats-server") or shutil.which(
        "nats-server", path="/usr/sbin:/usr/local/sbin"
    )
    if program is None:
        raise ConfigError(
            "no nats-server on PATH; install it (Debian: nats-server) or give "
            "the URL of a server"
        )
    with private_directory("pillarbox-nats-") as directory:
        server = NatsServer(program, directory, settings or {})
        with watched(directory, server.pid_file, signal.SIGKILL):
            try:
                server.start()
                yield server
            finally:
                server.kill()
