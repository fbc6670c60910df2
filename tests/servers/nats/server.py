"""A private NATS server with JetStream for tests, demo and benchmarks."""

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typing_extensions import override

from pillarbox.outbox.testing.lifetime import private_directory
from tests.servers.process import PrivateServer, find_program

__all__ = ["NatsServer", "nats_server"]


class NatsServer(PrivateServer):
    """One server process with its directory and port. Streams survive a restart."""

    def __init__(
        self, program: str, directory: Path, settings: Mapping[str, Any]
    ) -> None:
        super().__init__(directory)
        self._program = program
        self._settings = dict(settings)

    @property
    def url(self) -> str:
        """The URL of the server, the same after each start."""
        return f"nats://127.0.0.1:{self.port}"

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Change the settings, with effect from the next start."""
        self._settings = dict(settings)

    @override
    def command(self) -> Sequence[str]:
        own = {
            "host": "127.0.0.1",
            "port": self.port,
            "jetstream": {"store_dir": str(self.directory / "store")},
        }
        for name, value in self._settings.items():
            if name == "jetstream" and isinstance(value, dict):
                own["jetstream"] = own["jetstream"] | value  # type: ignore[operator]
            elif value is None:
                own.pop(name)
            else:
                own[name] = value
        configuration = self.directory / "nats.conf"
        # Its configuration syntax is a superset of JSON.
        configuration.write_text(json.dumps(own))
        return [self._program, "-c", str(configuration)]

    @override
    def answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                return connection.recv(5) == b"INFO "
        except OSError:
            return False


@contextmanager
def nats_server(settings: Mapping[str, Any] | None = None) -> Iterator[NatsServer]:
    """Yield a running server; remove it after the block, or when this process ends.

    `settings` are those of nats-server.conf; None for `jetstream` turns it off.
    """
    program = find_program("nats-server", package="nats-server")
    with (
        private_directory("pillarbox-nats-") as directory,
        NatsServer(program, directory, settings or {}).running() as server,
    ):
        yield server
