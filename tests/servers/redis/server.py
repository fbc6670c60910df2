"""A private Redis server for tests, demo and benchmarks.

By default it keeps nothing on disk, so its data is lost when it stops.
"""

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from typing_extensions import override

from pillarbox.outbox.testing.lifetime import private_directory
from tests.servers.process import PrivateServer, find_program

__all__ = ["RedisServer", "redis_program", "redis_server"]


class RedisServer(PrivateServer):
    """One server process with its directory and port."""

    def __init__(self, program: str, directory: Path, settings: Mapping[str, str]):
        super().__init__(directory)
        self._program = program
        self._settings = {"save": "", "appendonly": "no"} | dict(settings)

    @property
    def url(self) -> str:
        """The URL of the server, the same after each start."""
        return f"redis://127.0.0.1:{self.port}/0"

    @override
    def command(self) -> Sequence[str]:
        own = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": str(self.directory),
        }
        options = [
            part
            for name, value in (self._settings | own).items()
            for part in (f"--{name}", *(value.split() or [value]))
        ]
        return [self._program, *options]

    @override
    def answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(7) == b"+PONG\r\n"
        except OSError:
            return False


def redis_program() -> str:
    """Return the server's program, which may be Valkey's."""
    return find_program("redis-server", "valkey-server", package="redis-server")


@contextmanager
def redis_server(settings: Mapping[str, str] | None = None) -> Iterator[RedisServer]:
    """Yield a running server; remove it after the block, or when this process ends.

    `settings` are directives of redis.conf.
    """
    with (
        private_directory("pillarbox-redis-") as directory,
        RedisServer(redis_program(), directory, settings or {}).running() as server,
    ):
        yield server
