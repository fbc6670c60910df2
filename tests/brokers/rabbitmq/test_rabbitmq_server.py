"""The private RabbitMQ server."""

import subprocess
import sys
from pathlib import Path

import pytest

from outbox.errors import ConfigError, OutboxError
from outbox.testing.lifetime import is_running, wait_until
from tests.servers.rabbitmq import RabbitMQServer, rabbitmq_server

# Starts a server, prints its process id and its epmd's, and is killed.
OWNER = """
import os, signal
from pathlib import Path
from tests.servers.rabbitmq import rabbitmq_server

with rabbitmq_server() as server:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for child in children:
        if b"epmd" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\\0")[0]:
            print(child, server.pid_file.parent)
    print(server.pid_file.read_text(), server.pid_file.parent)
    os.sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.fault
def test_a_server_stops_when_its_owner_is_killed() -> None:
    owner = subprocess.run(
        [sys.executable, "-c", OWNER], capture_output=True, text=True, check=False
    )
    assert owner.returncode == -9, owner.stderr
    lines = [line.split(" ", 1) for line in owner.stdout.splitlines()]
    assert len(lines) == 2, owner.stdout
    pids = [int(pid) for pid, _ in lines]
    assert wait_until(lambda: not any(map(is_running, pids)), seconds=20)
    assert wait_until(lambda: not Path(lines[0][1]).exists(), seconds=20)


@pytest.mark.fault
def test_durable_data_survives_a_stop_and_a_kill(
    private_rabbitmq: RabbitMQServer,
) -> None:
    private_rabbitmq.evaluate('rabbit_vhost:add(<<"kept">>, <<"tests">>).')
    for end in (private_rabbitmq.stop, private_rabbitmq.kill):
        end()
        private_rabbitmq.start()
        kept = private_rabbitmq.evaluate('rabbit_vhost:exists(<<"kept">>).')
        assert kept == "true"


def test_erlang_is_evaluated_in_the_node(shared_rabbitmq: RabbitMQServer) -> None:
    assert shared_rabbitmq.evaluate("Two = 1 + 1, {Two, node}.") == "{2, node}"
    with pytest.raises(OutboxError, match="badmatch"):
        shared_rabbitmq.evaluate("ok = error.")


def test_without_the_server_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("tests.servers.rabbitmq.server._DEBIAN", tmp_path)
    with pytest.raises(ConfigError, match="install it"), rabbitmq_server():
        pass
