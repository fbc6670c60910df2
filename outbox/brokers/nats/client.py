"""nats-py's client, where it would give up, wait or go on in the clear."""

from collections.abc import Iterable
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.transport import TcpTransport
from nats.errors import ConnectionClosedError
from nats.errors import Error as NatsError
from typing_extensions import override

from outbox.brokers.nats.parser import LoudParser


class _Transport(TcpTransport):
    """Sends CONNECT together with the PING that follows it.

    A server that refuses the CONNECT says why and closes; what it has not read by
    then breaks the connection, and its reason is lost.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held = b""

    @override
    def __bool__(self) -> bool:
        # Otherwise the client would take another one.
        return True

    @override
    def write(self, payload: bytes) -> None:
        if payload.startswith(b"CONNECT "):
            self._held = payload
            return
        payload, self._held = self._held + payload, b""
        super().write(payload)  # type: ignore[no-untyped-call]


class NatsClient(Client):
    """nats-py's client, which would go on in the clear if the server offers no TLS."""

    def __init__(self, *, secure: bool) -> None:
        super().__init__()
        self._transport = _Transport()
        self._ps = LoudParser(self)
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
        # nats-py's own leaves out what isn't text; this keeps it as surrogates.
        lines = raw.decode(errors="surrogateescape").split("\r\n")
        pairs = (line.partition(":") for line in lines if line)
        return {name.strip(): value.strip() for name, _, value in pairs}

    @override
    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        try:
            found: dict[str, str] | None = await super()._process_headers(headers)
        except (UnicodeDecodeError, IndexError):
            # nats-py looks for a status in the first line, which strangers write, too.
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
        # nats-py's own raises at what isn't text, and stops reading for good.
        return Msg(
            _client=self,
            subject=subject.decode(errors="surrogateescape"),
            reply=reply.decode(errors="surrogateescape"),
            data=data,
            headers=headers,
            _sid=sid,
        )

    async def publish_all(self, commands: Iterable[bytes]) -> None:
        """Send commands in their order, without waiting for the server.

        `publish` spells out each header anew, and so takes twice as long.

        Raises:
            ConnectionClosedError: it is closed.
        """
        if not self.is_connected:
            raise ConnectionClosedError
        for command in commands:
            await self._send_command(command)
        await self._flush_pending()

    @override
    async def _close(self, status: int, do_cbs: bool = True) -> None:
        # It would wait for a server that takes nothing more, or stumble half-way
        # over what can't be written any more.
        self._pending.clear()
        self._pending_data_size = 0
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()
        await super()._close(status, do_cbs)
