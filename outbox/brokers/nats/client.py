"""nats-py's client, fixed where it would stop reading, wait or continue unencrypted.

nats-py has no public interface for these fixes, so they override or use private names,
which can change with any minor version. `pyproject.toml` therefore pins the version,
and `tests/brokers/nats/test_nats_client.py` fails when one of the names changes.

| private name | why |
|---|---|
| `_ps` | to end the connection where the parser would only log and stop reading |
| `_transport`, `_io_writer` | to learn why a server rejects it, and to close at once |
| `_process_info` | to send no password to a server that offers no TLS |
| `_process_headers`, `_parse_header_lines` | to read headers that aren't UTF-8 |
| `_build_message` | to read subjects that aren't UTF-8 |
| `_send_command`, `_flush_pending` | to publish a batch at twice the rate |
| `_close`, `_pending`, `_pending_data_size` | to close without waiting for the server |
| `_error_cb` | to report what the parser couldn't read |
"""

from collections.abc import Iterable
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.transport import TcpTransport
from nats.errors import ConnectionClosedError, ProtocolError
from nats.errors import Error as NatsError
from nats.protocol.parser import Parser
from typing_extensions import override


class _Parser(Parser):
    """Ends the connection where nats-py would only log an error and stop reading."""

    @override
    async def parse(self, data: bytes = b"") -> None:
        try:
            await super().parse(data)
        except (NatsError, OSError):
            raise
        except Exception as error:
            await self.nc._error_cb(error)
            raise ProtocolError from error


class _Transport(TcpTransport):
    """Sends CONNECT together with the PING that follows it.

    A server that rejects the CONNECT sends the reason and closes the connection. If a
    PING is still in flight then, the connection is reset and the reason is lost.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held = b""

    @override
    def __bool__(self) -> bool:
        # If it were false, the client would create its own transport.
        return True

    @override
    def write(self, payload: bytes) -> None:
        if payload.startswith(b"CONNECT "):
            self._held = payload
            return
        payload, self._held = self._held + payload, b""
        super().write(payload)  # type: ignore[no-untyped-call]


class NatsClient(Client):
    """nats-py's client with the changes in the table above.

    Args:
        secure: whether to reject a server that offers no TLS, before any password is
            sent.
    """

    def __init__(self, *, secure: bool) -> None:
        super().__init__()
        self._transport = _Transport()
        self._ps = _Parser(self)
        self._secure = secure

    @override
    async def _process_info(
        self, info: dict[str, Any], initial_connection: bool = False
    ) -> None:
        if self._secure and initial_connection and not info.get("tls_required"):
            raise NatsError("the server offers no TLS; write nats:// or enable it")
        await super()._process_info(info, initial_connection)

    @staticmethod
    @override
    def _parse_header_lines(raw: bytes) -> dict[str, str]:
        # nats-py drops bytes that aren't UTF-8; this keeps them as surrogates.
        lines = raw.decode(errors="surrogateescape").split("\r\n")
        pairs = (line.partition(":") for line in lines if line)
        return {name.strip(): value.strip() for name, _, value in pairs}

    @override
    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        try:
            found: dict[str, str] | None = await super()._process_headers(headers)
        except (UnicodeDecodeError, IndexError):
            # nats-py expects a status in the first line; producers can write anything.
            return {"": headers.decode(errors="surrogateescape")}
        return found

    @override
    def _build_message(
        self,
        sid: int,
        subject: bytes,
        reply: bytes,
        data: bytes,
        headers: dict[str, str] | None,
    ) -> Msg:
        # nats-py raises if the subject isn't UTF-8, and stops reading for good.
        return Msg(
            _client=self,
            subject=subject.decode(errors="surrogateescape"),
            reply=reply.decode(errors="surrogateescape"),
            data=data,
            headers=headers,
            _sid=sid,
        )

    async def publish_all(self, commands: Iterable[bytes]) -> None:
        """Send commands in order, without waiting for the server.

        nats-py's `publish` encodes the headers of each message, and takes twice as
        long.

        Raises:
            ConnectionClosedError: the connection is closed.
        """
        if not self.is_connected:
            raise ConnectionClosedError
        for command in commands:
            await self._send_command(command)
        await self._flush_pending()

    @override
    async def _close(self, status: int, do_cbs: bool = True) -> None:
        # nats-py would wait for a server that has stopped reading, or raise halfway
        # because a write fails.
        self._pending.clear()
        self._pending_data_size = 0
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()
        await super()._close(status, do_cbs)
