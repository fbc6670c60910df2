"""A private RabbitMQ server for tests, demo and benchmarks.

A node of its own with its own ports, directory, cookie and name server of Erlang
(epmd): it neither meets another node on the machine nor reads its configuration.
What is durable survives a kill, as long as the block lasts.
"""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from outbox.errors import ConfigError, OutboxError
from outbox.testing.lifetime import free_port, private_directory, wait_until, watched

__all__ = ["RabbitMQServer", "rabbitmq_server"]

# Where Debian has the programs, outside of PATH; those on PATH want another user.
_DEBIAN = Path("/usr/lib/rabbitmq/bin")
_START = 90
# Which log a quorum queue has stands in a table that is written when it hasn't been
# used for half a second; from RabbitMQ 3.13.4 on, at once.
_WRITE_NAMES = (
    "#{names := #{directory_rev := Names}} = ra_system:fetch(quorum_queues),"
    " ok = dets:sync(Names)."
)
_PROTOCOL = b"AMQP\x00\x00\x09\x01"


class RabbitMQServer:
    """One node: its directory, its ports and its life."""

    def __init__(self, directory: Path, epmd_port: int, settings: Mapping[str, str]):
        self._directory = directory
        self._settings = settings
        self._port = free_port()
        self._environment = _environment(directory, self._port, epmd_port)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it is, the same after each start."""
        return f"amqp://guest:guest@127.0.0.1:{self._port}"

    @property
    def pid_file(self) -> Path:
        """Where the process id of the running server stands."""
        return self._directory / "rabbitmq.pid"

    def start(self) -> None:
        """Start, and return when it takes connections."""
        lines = [f"{name} = {value}" for name, value in self._settings.items()]
        (self._directory / "rabbitmq.conf").write_text("\n".join([*lines, ""]))
        with (self._directory / "output").open("wb") as output:
            self._process = process = subprocess.Popen(
                [_program("rabbitmq-server"), "-noinput"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._directory,
                env=self._environment,
                start_new_session=True,
            )
        wait_until(
            lambda: self._answers() or process.poll() is not None, seconds=_START
        )
        if not self._answers() or process.poll() is not None:
            self.kill()
            report = (self._directory / "output").read_text(errors="replace")
            raise OutboxError(f"rabbitmq-server doesn't answer: {report[-2000:]}")

    def stop(self) -> None:
        """Stop in order, and return when it is over."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Stop as a crash does."""
        self._end(signal.SIGKILL)

    def control(self, *arguments: str) -> str:
        """Run rabbitmqctl and give what it prints."""
        done = subprocess.run(
            [_program("rabbitmqctl"), "--quiet", *arguments],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise OutboxError(f"rabbitmqctl {arguments[0]}: {done.stderr.strip()}")
        return done.stdout

    def write_names(self) -> None:
        """Have on disk which quorum queues there are.

        A kill right after one was made loses it for good: it can't be published to,
        and what it confirmed is gone.
        """
        self.control("eval", _WRITE_NAMES)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(timeout=60)
            self._process = None
        self.pid_file.unlink(missing_ok=True)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._port), 1) as connection:
                connection.sendall(_PROTOCOL)
                return connection.recv(1) == b"\x01"
        except OSError:
            return False


@contextmanager
def rabbitmq_server(
    settings: Mapping[str, str] | None = None,
) -> Iterator[RabbitMQServer]:
    """Give a running server that is gone after the block, or with this process.

    `settings` are lines of rabbitmq.conf.
    """
    _program("rabbitmq-server")
    with (
        _epmd() as epmd_port,
        private_directory("pillarbox-rabbitmq-", durable=False) as directory,
    ):
        server = RabbitMQServer(directory, epmd_port, settings or {})
        with watched(directory, server.pid_file, signal.SIGKILL):
            try:
                server.start()
                yield server
            finally:
                server.kill()


@contextmanager
def _epmd() -> Iterator[int]:
    program = shutil.which("epmd")
    if program is None:
        raise ConfigError("no epmd on PATH; install Erlang (Debian: erlang-base)")
    port = free_port()
    with private_directory("pillarbox-epmd-") as directory:
        pid_file = directory / "epmd.pid"
        with watched(directory, pid_file, signal.SIGKILL):
            process = subprocess.Popen(
                [program, "-address", "127.0.0.1", "-port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                pid_file.write_text(str(process.pid))
                yield port
            finally:
                process.kill()
                process.wait(timeout=60)


def _environment(directory: Path, port: int, epmd_port: int) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RABBITMQ_", "ERL_"))
    }
    (directory / "enabled_plugins").write_text("[].\n")
    (directory / "environment.conf").touch()
    return kept | {
        "HOME": str(directory),
        "ERL_CRASH_DUMP_SECONDS": "0",
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "ERL_EPMD_PORT": str(epmd_port),
        "RABBITMQ_NODENAME": f"pillarbox-{port}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
        "RABBITMQ_LOG_BASE": str(directory / "log"),
        "RABBITMQ_CONF_ENV_FILE": str(directory / "environment.conf"),
        "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq.conf"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins"),
        "RABBITMQ_PID_FILE": str(directory / "rabbitmq.pid"),
        # It makes the script become the server instead of watching over it.
        "RABBITMQ_ALLOW_INPUT": "true",
    }


def _program(name: str) -> str:
    found = shutil.which(str(_DEBIAN / name)) or shutil.which(name)
    if found is None:
        raise ConfigError(
            f"no {name} on PATH; install it (Debian: rabbitmq-server) or give "
            "the URL of a server"
        )
    return found
