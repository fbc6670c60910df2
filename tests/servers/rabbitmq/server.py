"""A private RabbitMQ server for tests, demo and benchmarks.

It is a node with its own ports, directory, cookie and Erlang name server (epmd): it
neither connects to another node on the machine nor reads that node's configuration.
Durable queues survive a kill until the end of the block.
"""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from typing_extensions import override

from pillarbox.outbox.errors import OutboxError
from pillarbox.outbox.testing.lifetime import free_port, private_directory, watched
from tests.servers.process import PrivateServer, find_program

__all__ = ["RabbitMQServer", "rabbitmq_server"]

# Debian's programs, which are not on PATH; those on PATH require another user.
_DEBIAN = "/usr/lib/rabbitmq/bin:/usr/lib/erlang/bin"
# RabbitMQ before 3.13.4 writes the table of the quorum queues' logs to disk only after
# it hasn't changed for half a second.
_WRITE_NAMES = (
    "#{names := #{directory_rev := Names}} = ra_system:fetch(quorum_queues),"
    " ok = dets:sync(Names)."
)
# RabbitMQ starts by loading all modules of its applications, one after the other, and
# each time Erlang copies its table of all functions. Loading them together, on all
# cores, halves the time of a start, and saves a fifth of its CPU time. At each start
# and every minute, RabbitMQ also starts a node with its name on the command line, to
# make sure that epmd is running: that node needs no modules, and loading them would
# take it a second.
_LOAD_TOGETHER = """\
Applications = fun
    (Next, [App | Others], Seen) ->
        case lists:member(App, Seen)
            orelse file:consult(code:where_is_file(atom_to_list(App) ++ ".app")) of
            {ok, [{application, _, Keys}]} ->
                Needed = proplists:get_value(applications, Keys, []),
                Next(Next, Needed ++ Others, [App | Seen]);
            _ -> Next(Next, Others, Seen)
        end;
    (_, [], Seen) -> Seen
end,
Modules = fun(App) ->
    {ok, [{_, _, Keys}]} =
        file:consult(code:where_is_file(atom_to_list(App) ++ ".app")),
    proplists:get_value(modules, Keys, [])
end,
init:get_argument(sname) =/= error orelse
    code:ensure_modules_loaded(
        lists:flatmap(Modules, Applications(Applications, [rabbit], []))).
"""
_PROTOCOL = b"AMQP\x00\x00\x09\x01"


class RabbitMQServer(PrivateServer):
    """One node with its directory and ports."""

    seconds_to_start = 180

    def __init__(self, directory: Path, epmd_port: int, settings: Mapping[str, str]):
        super().__init__(directory)
        self._settings = settings
        self._environment = _environment(directory, self.port, epmd_port)

    @property
    def url(self) -> str:
        """The URL of the node, the same after each start."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}"

    @override
    def command(self) -> Sequence[str]:
        lines = [f"{name} = {value}" for name, value in self._settings.items()]
        (self.directory / "rabbitmq.conf").write_text("\n".join([*lines, ""]))
        return [_program("rabbitmq-server"), "-noinput"]

    @override
    def environment(self) -> Mapping[str, str]:
        # Not passed to rabbitmqctl, which is also an Erlang program.
        script = self.directory / "load_together"
        script.write_text(_LOAD_TOGETHER)
        return {**self._environment, "ERL_AFLAGS": f"-eval \"file:eval('{script}').\""}

    @override
    def answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                connection.sendall(_PROTOCOL)
                return connection.recv(1) == b"\x01"
        except OSError:
            return False

    def evaluate(self, expression: str) -> str:
        """Evaluate Erlang in the node, and return the value as Erlang writes it.

        The expression ends with a period. This takes a hundredth of the time of
        rabbitmqctl, which starts its own Erlang VM.

        Raises:
            OutboxError: the expression can't be evaluated, or failed.
        """
        program = _program("erl_call")
        address = f"127.0.0.1:{self._environment['RABBITMQ_DIST_PORT']}"
        cookie = (self.directory / ".erlang.cookie").read_text()
        done = subprocess.run(
            [program, "-address", address, "-c", cookie, "-e"],
            input=f"{expression}\n",
            capture_output=True,
            text=True,
            check=False,
        )
        said = done.stdout.strip()
        if done.returncode or not said.startswith("{ok, "):
            raise OutboxError(f"Erlang: {expression}: {said}{done.stderr.strip()}")
        return said.removeprefix("{ok, ").removesuffix("}")

    def write_names(self) -> None:
        """Write the list of quorum queues to disk.

        Otherwise, if the node is killed right after a queue was declared, the queue is
        lost for good: nothing can be published to it, and confirmed messages are lost.
        """
        self.evaluate(_WRITE_NAMES)


@contextmanager
def rabbitmq_server(
    settings: Mapping[str, str] | None = None,
) -> Iterator[RabbitMQServer]:
    """Yield a running server; remove it after the block, or when this process ends.

    `settings` are lines of rabbitmq.conf.
    """
    _program("rabbitmq-server")
    with (
        _epmd() as epmd_port,
        private_directory("pillarbox-rabbitmq-", durable=False) as directory,
        RabbitMQServer(directory, epmd_port, settings or {}).running() as server,
    ):
        yield server


@contextmanager
def _epmd() -> Iterator[int]:
    program = _program("epmd")
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
        # Keeps idle schedulers from spinning, which takes a fifth of the CPU time of a
        # start, and more while the server is idle.
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
            "+sbwt none +sbwtdcpu none +sbwtdio none"
        ),
        # This makes the script exec the server instead of supervising it.
        "RABBITMQ_ALLOW_INPUT": "true",
    }


def _program(name: str) -> str:
    return find_program(name, package="rabbitmq-server", places=_DEBIAN)
