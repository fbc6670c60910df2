"""Connecting to NATS: users, TLS, and the reasons for a rejected connection."""

import asyncio
import select
import socket
from pathlib import Path
from threading import Thread

import pytest

from pillarbox import Message
from pillarbox.outbox.brokers.nats.connection import NatsConnection
from pillarbox.outbox.brokers.nats.settings import NatsSettings
from pillarbox.outbox.errors import BrokerUnavailableError
from pillarbox.relay.publisher import Acked, Nacked
from pillarbox.relay.publishers.nats import NatsPublisher
from tests.fixtures.certificates import certificate_in
from tests.servers.nats import NatsServer, nats_server

_INFO = b'INFO {"version":"2.10.0","max_payload":1048576,"auth_required":true}\r\n'


async def test_a_user_publishes_only_what_its_permissions_allow() -> None:
    user = {
        "user": "relay",
        "password": "p@ss",
        "permissions": {"publish": {"deny": ["secret.>"]}},
    }
    settings = {"authorization": {"users": [user], "timeout": 60}}
    with nats_server(settings) as server:
        address = server.url.removeprefix("nats://")
        good = f"nats://relay:p%40ss@{address}?stream=ALL&create=orders.>,secret.>"
        async with NatsPublisher(good) as publisher:
            refused, acked = await publisher.publish(
                [Message("secret.X", b""), Message("orders.x", b"")]
            )
            (again,) = await publisher.publish([Message("secret.X", b"")])
        assert isinstance(refused, Nacked)
        assert isinstance(again, Nacked)
        assert not refused.permanent
        assert "permissions violation" in refused.reason
        assert acked == Acked()
        for credentials in ("relay:wrong@", "token@", ""):
            url = f"nats://{credentials}{address}"
            with pytest.raises(
                BrokerUnavailableError, match="rejected the connection"
            ) as told:
                async with NatsPublisher(url):
                    pass
            assert "wrong" not in str(told.value)


async def test_tls_is_required_even_if_the_server_offers_none(
    shared_nats: NatsServer,
) -> None:
    url = shared_nats.url.replace("nats://", "tls://relay:secret@")
    with pytest.raises(BrokerUnavailableError, match="offers no TLS"):
        async with NatsPublisher(url):
            pass


async def test_tls_is_used_and_verified(tmp_path: Path) -> None:
    chain, key, authority = certificate_in(tmp_path)
    files = {"cert_file": str(chain), "key_file": str(key)}
    with nats_server({"tls": files | {"timeout": 60}}) as server:
        url = server.url.replace("nats://", "tls://") + "?stream=S&create=orders.>"
        async with NatsPublisher(f"{url}&tls_ca={authority}") as publisher:
            assert await publisher.publish([Message("orders.x", b"")]) == [Acked()]
        with pytest.raises(BrokerUnavailableError, match="certificate"):
            async with NatsPublisher(url):
                pass


async def test_the_servers_reason_is_reported_however_it_closes() -> None:
    def refuse(listening: socket.socket) -> None:
        for _ in range(20):
            connection, _ = listening.accept()
            with connection:
                connection.sendall(_INFO)
                assert connection.recv(4096).startswith(b"CONNECT ")
                # Leave the next bytes unread, which would reset the connection.
                select.select([connection], [], [], 0.02)
                connection.sendall(b"-ERR 'Authorization Violation'\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = Thread(target=refuse, args=(listening,), daemon=True)
        server.start()
        url = f"nats://token@127.0.0.1:{listening.getsockname()[1]}"
        for _ in range(20):
            with pytest.raises(BrokerUnavailableError, match="rejected the connection"):
                async with NatsPublisher(url):
                    pass
        server.join(timeout=60)


async def test_an_error_while_reading_ends_the_connection_and_is_reported(
    shared_nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise ValueError("no number")

    lost = asyncio.Event()
    connection = NatsConnection(
        NatsSettings.from_url(shared_nats.url), on_lost=lambda _: lost.set()
    )
    await connection.open()
    try:
        await connection.client.subscribe("here", cb=fail)
        monkeypatch.setattr(connection.client, "_process_msg", fail)
        await connection.client.publish("here", b"")
        async with asyncio.timeout(60):
            await lost.wait()
        assert str(connection.lost).endswith("can't be used: no number")
    finally:
        await connection.drop()
