"""nats-py's client, fixed where it would stop reading, wait or continue unencrypted.

nats-py has no public interface for these fixes, so they use private names. A client
isn't made if one of them is missing, and `tests/brokers/nats/test_nats_client.py` fails
when one changes. `docs/brokers/nats.md` has what the public way costs.

| private name | why |
|---|---|
| `_transport` | to have a socket of our own, which also sends a batch at once |
| `_io_writer` | to send no password without TLS, and to close at once |
| `_ps` | to end the connection where the parser would only log and stop reading |
| `_process_headers` | to read headers that aren't UTF-8 |
| `_build_message` | to read subjects that aren't UTF-8 |
"""

import asyncio
import re
from collections.abc import Iterable
from typing import Final

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.transport import TcpTransport
from nats.errors import ConnectionClosedError
from nats.errors import Error as NatsError
from nats.protocol.parser import Parser
from typing_extensions import override

from pillarbox.outbox.errors import ConfigError

PRIVATE: Final = frozenset(
    {"_transport", "_io_writer", "_ps", "_process_headers", "_build_message"}
)
_FIRST_LINE: Final = re.compile(r"NATS/1\.0(?: (\d{3})(?: (.*))?)?")


class _Parser(Parser):
    """Ends the connection where nats-py would only log an error and stop reading."""

    @override
    async def parse(self, data: bytes = b"") -> None:
        try:
            await super().parse(data)
        except (NatsError, OSError):
            raise
        except Exception as error:
            raise OSError(str(error)) from error


class _Socket(TcpTransport):
    """Sends CONNECT together with the PING that follows it, and waits for nothing.

    A server that rejects the CONNECT sends the reason and closes the connection. If a
    PING is still in flight then, the connection is reset and the reason is lost.
    """

    def __init__(self, *, secure: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._secure = secure
        self._held = b""

    @override
    def __bool__(self) -> bool:
        # If it were false, the client would create its own transport.
        return True

    @override
    def write(self, payload: bytes) -> None:
        if payload.startswith(b"CONNECT "):
            assert self._io_writer is not None, "it is connected"
            if self._secure and not self._io_writer.get_extra_info("ssl_object"):
                raise NatsError("the server offers no TLS; write nats:// or enable it")
            self._held = payload
            return
        payload, self._held = self._held + payload, b""
        super().write(payload)  # type: ignore[no-untyped-call]

    @override
    async def drain(self) -> None:
        # It would wait for a server that has stopped reading, even to close.
        pass

    @override
    def close(self) -> None:
        if self._io_writer is not None:
            self._io_writer.transport.abort()


class NatsClient(Client):
    """nats-py's client with the changes in the table above.

    Args:
        secure: whether to reject a server that offers no TLS, before any password is
            sent.

    Raises:
        ConfigError: this version of nats-py has changed what is used here.
    """

    def __init__(self, *, secure: bool) -> None:
        super().__init__()
        socket = _Socket(secure=secure)
        if missing := PRIVATE - {*dir(Client), *vars(self), *vars(socket)}:
            raise ConfigError(
                f"this version of nats-py has no {', '.join(sorted(missing))}: install "
                "the one in pillarbox's requirements.lock, or a newer pillarbox"
            )
        self._transport = socket
        self._ps = _Parser(self)

    @override
    async def _process_headers(self, headers: bytes | None) -> dict[str, str] | None:
        # nats-py drops what isn't UTF-8, and fails if the first line isn't its own.
        if not headers:
            return None
        text = headers.decode(errors="surrogateescape")
        first, *lines = text.split("\r\n")
        form = _FIRST_LINE.fullmatch(first)
        if form is None:
            return {"": text}
        found = {}
        for line in filter(None, lines):
            name, _, value = line.partition(":")
            found[name.strip()] = value.strip()
        if form[1]:
            found |= {"Status": form[1], "Description": form[2] or ""}
        return found or None

    @override
    def _build_message(
        self,
        sid: int,
        subject: bytes,
        reply: bytes,
        data: bytes,
        headers: dict[str, str] | None,
    ) -> Msg:
        # nats-py fails if the subject isn't UTF-8.
        topic = subject.decode(errors="surrogateescape")
        return Msg(self, topic, reply.decode(errors="surrogateescape"), data, headers)

    async def written(self) -> None:
        """Return when everything that was given to nats-py is written to the socket.

        Raises:
            ConnectionClosedError: the connection is closed.
        """
        # No event shows it.
        while self.pending_data_size and self.is_connected:  # noqa: ASYNC110
            await asyncio.sleep(0)
        if not self.is_connected:
            raise ConnectionClosedError

    async def publish_all(self, commands: Iterable[bytes]) -> None:
        """Send commands in order, without waiting for the server.

        Raises:
            ConnectionClosedError: the connection is closed.
        """
        await self.written()
        assert self._transport is not None, "it is set"
        self._transport.writelines([*commands])
