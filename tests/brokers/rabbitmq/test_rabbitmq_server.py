"""The private RabbitMQ server, and what only its settings show."""

import asyncio
import socket
import subprocess
import sys

import pytest

from pillarbox import Message
from pillarbox.outbox.errors import BrokerUnavailableError
from pillarbox.outbox.testing.lifetime import is_running, wait_until
from pillarbox.relay.publisher import Acked, Nacked
from pillarbox.relay.publishers.rabbitmq import RabbitMQPublisher
from tests.fixtures.certificates import Certificate
from tests.fixtures.consumers import numbered
from tests.fixtures.rabbitmq import MAX_MESSAGE_BYTES, bind, drain
from tests.fixtures.waiting import wait_for
from tests.servers.rabbitmq import RabbitMQServer

# Starts an epmd, prints its process id, and is killed.
OWNER = """
import os, signal
from pathlib import Path
from tests.servers.rabbitmq.server import _epmd

def is_epmd(child):
    return b"epmd" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\\0")[0]

with _epmd():
    started = []
    while not started:  # between fork and exec it has another name
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        started = list(filter(is_epmd, children))
    print(*started, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.fault
def test_the_name_server_stops_when_its_owner_is_killed() -> None:
    owner = subprocess.run(
        [sys.executable, "-c", OWNER], capture_output=True, text=True, check=False
    )
    assert owner.returncode == -9, owner.stderr
    (pid,) = map(int, owner.stdout.split())
    assert wait_until(lambda: not is_running(pid), seconds=20)


async def test_a_message_too_large_for_the_server_is_refused_alone(
    private_rabbitmq: RabbitMQServer,
) -> None:
    url = f"{private_rabbitmq.url}?exchange=test"
    bind(url, "orders")
    batches = [numbered(30, keys=3), numbered(30, keys=3)]
    large = Message("orders", bytes(MAX_MESSAGE_BYTES + 1), key="key 0")
    async with RabbitMQPublisher(url) as publisher:
        one, other = await asyncio.gather(
            publisher.publish([*batches[0][:15], large, *batches[0][15:]]),
            publisher.publish(batches[1]),
        )
    refused = one[15]
    assert isinstance(refused, Nacked)
    assert refused.permanent
    assert "larger than configured max size" in refused.reason
    assert [*one[:15], *one[16:], *other] == [Acked()] * 60
    arrived = drain(url, "orders", 60)
    firsts = list(dict.fromkeys(m.id for m in arrived if m.key == "key 0"))
    expected = [m.id for m in batches[0] if m.key == "key 0"]
    assert [id for id in firsts if id in expected] == expected


def is_listening(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


async def test_amqps_verifies_the_servers_certificate(
    private_rabbitmq: RabbitMQServer,
    rabbitmq_certificate: Certificate,
    rabbitmq_tls_port: int,
) -> None:
    bind(f"{private_rabbitmq.url}?exchange=tls", "secure")
    wait_for("the listener for TLS", lambda: is_listening(rabbitmq_tls_port))
    secure = f"amqps://guest:guest@127.0.0.1:{rabbitmq_tls_port}?exchange=tls"
    trusted = f"{secure}&cacertfile={rabbitmq_certificate.authority}"
    async with RabbitMQPublisher(trusted) as publisher:
        assert await publisher.publish(numbered(500, topic="secure")) == [Acked()] * 500
    elsewhere = trusted.replace("127.0.0.1", "localhost")
    for wrong in (secure, elsewhere):
        with pytest.raises(BrokerUnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
            async with RabbitMQPublisher(wrong):
                pass
