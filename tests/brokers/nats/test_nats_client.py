"""The private names of nats-py that pillarbox uses mean what it relies on."""

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.transport import TcpTransport
from nats.protocol.parser import Parser
from typing_extensions import override

from pillarbox.outbox.brokers.nats import client
from pillarbox.outbox.brokers.nats.client import NatsClient
from pillarbox.outbox.errors import ConfigError
from tests.fixtures.nats import have_sent_all, put_block
from tests.servers.nats import NatsServer

CHANGED = (
    "nats-py has changed {}: read its new code, correct outbox/brokers/nats/client.py, "
    "and run tests/brokers/nats"
)
PARAMETERS = {
    "_process_headers": "self headers",
    "_build_message": "self sid subject reply data headers",
}


class Spy(Client):
    """nats-py's client, which notes what it does with each private name."""

    def __init__(self) -> None:
        super().__init__()
        self.before = self._transport
        self.seen: dict[str, Any] = {}
        self._transport = self.socket = SpySocket(self.seen)
        self._ps = SpyParser(self, self.seen)

    @override
    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        self.seen["_process_headers"] = headers
        return {"from": "here"}

    @override
    def _build_message(
        self,
        sid: int,
        subject: bytes,
        reply: bytes,
        data: bytes,
        headers: dict[str, str] | None,
    ) -> Msg:
        self.seen["_build_message"] = (sid, subject, reply, data, headers)
        return Msg(self, "built", "by", b"us", headers)


class SpySocket(TcpTransport):
    def __init__(self, seen: dict[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.before = self._io_writer
        self.written: list[bytes] = seen.setdefault("_transport", [])

    @override
    def __bool__(self) -> bool:
        return True

    @override
    def write(self, payload: bytes) -> None:
        self.written.append(payload)
        super().write(payload)  # type: ignore[no-untyped-call]

    @override
    def close(self) -> None:
        self.written.append(b"closed")
        super().close()  # type: ignore[no-untyped-call]


class SpyParser(Parser):
    def __init__(self, owner: Client, seen: dict[str, Any]) -> None:
        super().__init__(owner)
        self._seen = seen

    @override
    async def parse(self, data: bytes = b"") -> None:
        self._seen["_ps"] = self._seen.get("_ps", b"") + data
        await super().parse(data)


@asynccontextmanager
async def received(
    made: Client, server: NatsServer, block: bytes, subject: bytes = b"here.x"
) -> AsyncIterator[Msg]:
    """Yield a message with these headers, as the client received it."""
    arrived: asyncio.Queue[Msg] = asyncio.Queue()
    await made.connect(server.url, allow_reconnect=False)
    try:
        await made.subscribe("here.*", cb=arrived.put)
        await have_sent_all(made)
        await put_block(server.url, subject, block, b"payload")
        async with asyncio.timeout(60):
            yield await arrived.get()
    finally:
        await made.close()


@pytest.mark.parametrize("name", sorted(client.PRIVATE))
async def test_nats_py_still_uses_this_private_name_as_its_client_expects(
    shared_nats: NatsServer, name: str
) -> None:
    changed = CHANGED.format(name)
    assert name in {*dir(Client()), *dir(TcpTransport())}, changed  # type: ignore[no-untyped-call]
    if parameters := PARAMETERS.get(name):
        found = inspect.signature(getattr(Client, name)).parameters
        assert " ".join(found) == parameters, changed
    spy, block = Spy(), b"NATS/1.0\r\na: b\r\n\r\n"
    async with received(spy, shared_nats, block) as got:
        writer = spy.socket._io_writer
        seen: Any = spy.seen.get(name)
        match name:
            case "_transport":
                assert spy.before is None, changed
                assert [it.partition(b" ")[0] for it in seen[:2]] == [
                    b"CONNECT",
                    b"PING\r\n",
                ], changed
            case "_io_writer":
                assert spy.socket.before is None, changed
                assert isinstance(writer, asyncio.StreamWriter), changed
                assert writer.get_extra_info("peername")[1] == shared_nats.port
            case "_ps":
                assert block in (seen or b""), changed
            case "_process_headers":
                assert seen == block, changed
                assert got.headers == {"from": "here"}, changed
            case "_build_message":
                fields = (1, b"here.x", b"", b"payload", {"from": "here"})
                assert seen == fields, changed
                assert (got.subject, got.reply, got.data) == ("built", "by", b"us")
            case _:
                pytest.fail(f"say here what nats-py must do with {name}")
    assert spy.seen["_transport"][-1] == b"closed", CHANGED.format("_transport")


def test_a_client_of_a_changed_nats_py_is_not_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "PRIVATE", client.PRIVATE | {"_renamed"})
    with pytest.raises(ConfigError, match="nats-py has no _renamed: install"):
        NatsClient(secure=False)


@pytest.mark.parametrize(
    ("block", "headers"),
    [
        (b"NATS/1.0\r\na: b\r\nc:d\r\n\r\n", {"a": "b", "c": "d"}),
        (b"NATS/1.0\r\n\xe9: \xff\r\n\r\n", {"\udce9": "\udcff"}),
        (
            b"NATS/1.0 404 No Messages\r\nx: y\r\n\r\n",
            {"x": "y", "Status": "404", "Description": "No Messages"},
        ),
        (b"NATS/1.0 503\r\n\r\n", {"Status": "503", "Description": ""}),
        (b"NATS/1.0\r\n\r\n", None),
        (b"NATS/1.0", None),
        (b"NATS/1.0 \xff\r\n\r\n", {"": "NATS/1.0 \udcff\r\n\r\n"}),
        (b"\xff", {"": "\udcff"}),
    ],
)
async def test_headers_and_subjects_of_any_bytes_are_read_without_loss(
    shared_nats: NatsServer, block: bytes, headers: dict[str, str] | None
) -> None:
    made = NatsClient(secure=False)
    async with received(made, shared_nats, block, b"here.\xff") as got:
        assert (got.headers, got.data) == (headers, b"payload")
        assert got.subject == "here.\udcff"


async def test_a_client_closes_at_once_if_the_server_has_stopped_reading() -> None:
    stopped = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"headers":true,"max_payload":1048576}\r\n')
        await reader.readuntil(b"PING\r\n")
        writer.write(b"PONG\r\n")
        await stopped.wait()
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    made = NatsClient(secure=False)
    await made.connect(f"nats://127.0.0.1:{port}", allow_reconnect=False)
    try:
        await made.publish("x", bytes(1 << 20))
        await made.publish_all([bytes(1 << 24)])
        await made.publish("x", bytes(1 << 20))
        async with asyncio.timeout(60):
            await made.close()
    finally:
        stopped.set()
        server.close()
        await server.wait_closed()


async def test_no_password_is_sent_to_a_server_without_tls() -> None:
    sent: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"auth_required":true}\r\n')
        sent.set_result(await reader.read())
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        made = NatsClient(secure=True)
        url = f"tls://127.0.0.1:{port}"
        with pytest.raises(Exception, match="offers no TLS"):
            await made.connect(
                url, user="relay", password="secret", allow_reconnect=False
            )
        await made.close()
        assert await sent == b""
