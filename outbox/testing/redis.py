"""A private Redis server for tests, demo and benchmarks.

It keeps nothing on disk unless asked: what was in it is gone when it stops.
"""

import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from outbox.errors import ConfigError, OutboxError
from outbox.testing.lifetime import free_port, private_directory, wait_until, watched

__all__ = ["RedisServer", "redis_server"]


class RedisServer:
    """One server: its directory, its port and its life."""

    def __init__(self, program: str, directory: Path, settings: Mapping[str, str]):
        self._program = program
        self._directory = directory
        self._settings = {"save": "", "appendonly": "no"} | dict(settings)
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it is, the same after each start."""
        return f"redis://127.0.0.1:{self._port}/0"

    @property
    def pid_file(self) -> Path:
        """Where the process id of the running server stands."""
        return self._directory / "redis.pid"

    def start(self) -> None:
        """Start, and return when it answers."""
        own = {
            "bind": "127.0.0.1",
            "port": str(self._port),
            "dir": str(self._directory),
            "pidfile": str(self.pid_file),
            "logfile": str(self._directory / "redis.log"),
        }
        options = [
            part
            for name, value in (self._settings | own).items()
            for part in (f"--{name}", value)
        ]
        self._process = process = subprocess.Popen(
            [self._program, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        done = wait_until(
            lambda: process.poll() is not None or self._answers(), seconds=60
        )
        if not done or process.poll() is not None:
            self.kill()
            log = self._directory / "redis.log"
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
                connection.sendall(b"PING\r\n")
                return connection.recv(7) == b"+PONG\r\n"
        except OSError:
            return False


@contextmanager
def redis_server(settings: Mapping[str, str] | None = None) -> Iterator[RedisServer]:
    """Give a running server that is gone after the block, or with this process.

    `settings` are directives of redis.conf.
    """
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise ConfigError(
            "no redis-server on PATH; install it (Debian: redis-server) or give "
            "the URL of a server"
        )
    with private_directory("pillarbox-redis-") as directory:
        server = RedisServer(program, directory, settings or {})
        with watched(directory, server.pid_file, signal.SIGKILL):
            try:
                server.start()
                yield server
            finally:
                server.kill()
