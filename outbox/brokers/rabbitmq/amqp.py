"""AMQP under asyncio: pika's connection and channels, with awaitable answers."""

import asyncio
import struct
from collections.abc import Callable
from typing import Any, Final, Self

import pika
from pika import BasicProperties, spec
from pika.adapters.asyncio_connection import (
    AsyncioConnection,
    _AsyncioIOServicesAdapter,
)
from pika.adapters.utils.nbio_interface import AbstractIOReference
from pika.channel import Channel as PikaChannel
from pika.exceptions import (
    AMQPConnectionError,
    ChannelClosedByBroker,
    InvalidFrameError,
)
from pika.frame import Header, decode_frame
from typing_extensions import override

from pillarbox.outbox.errors import ConfigError

NOT_FOUND: Final = 404
PRECONDITION_FAILED: Final = 406
_CONNECT: Final = 10.0
_ANSWER: Final = 10.0
_CLOSE: Final = 5.0


class Channel:
    """A channel, and the reason why it was closed.

    Attributes:
        closed: done when the channel is closed, with the reason as its result.
    """

    def __init__(self, pika_channel: PikaChannel, closed: "asyncio.Future[Any]"):
        self.pika = pika_channel
        self.closed = closed

    async def ask(self, method: Callable[..., Any], **arguments: Any) -> Any:
        """Call a method of pika's channel that accepts a callback; return the answer.

        Raises:
            AMQPError: the channel or the connection was closed instead.
            TimeoutError: there was no answer in time.
        """
        answer = asyncio.get_running_loop().create_future()
        method(callback=lambda frame=None: _settle(answer, frame), **arguments)
        await asyncio.wait(
            {answer, self.closed},
            timeout=_ANSWER,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if answer.done():
            return answer.result()
        if self.closed.done():
            raise self.closed.result()
        raise TimeoutError(f"no answer within {_ANSWER:.0f} s")

    async def close(self) -> None:
        """Close the channel once the server has processed everything sent on it.

        Raises:
            AMQPError: the connection was lost instead.
            TimeoutError: there was no answer in time.
        """
        if self.pika.is_open:
            self.pika.close()
        await asyncio.wait({self.closed}, timeout=_ANSWER)
        if not self.closed.done():
            raise TimeoutError(f"no answer within {_ANSWER:.0f} s")
        if isinstance(self.closed.result(), AMQPConnectionError):
            raise self.closed.result()


class AmqpConnection:
    """One connection, from its opening to its loss.

    Attributes:
        blocked: done while the server accepts no messages, with the reason as its
            result.
    """

    def __init__(self, connection: "_Connection") -> None:
        self.blocked: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._aborted = False
        self._connection = connection
        self._lost: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        connection.add_on_close_callback(lambda _, why: _settle(self._lost, why))
        connection.add_on_connection_blocked_callback(self._on_blocked)
        connection.add_on_connection_unblocked_callback(self._on_unblocked)

    @classmethod
    async def open(cls, parameters: pika.connection.Parameters) -> Self:
        """Connect.

        Raises:
            AMQPError, OSError: the connection can't be opened.
        """
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[Any] = loop.create_future()
        failed: asyncio.Future[Any] = loop.create_future()
        connection = _Connection(
            parameters,
            on_open_callback=lambda ready: _settle(opened, ready),
            on_open_error_callback=lambda _, why: _settle(failed, why),
            on_close_callback=lambda _, why: _settle(failed, why),
            custom_ioloop=_IOServices(loop),
        )
        try:
            await asyncio.wait(
                {opened, failed},
                timeout=_CONNECT,
                return_when=asyncio.FIRST_COMPLETED,
            )
        except asyncio.CancelledError:
            connection.abort()
            await asyncio.wait({failed}, timeout=_CLOSE)
            raise
        if opened.done():
            return cls(connection)
        if not failed.done():
            connection.abort()
            await asyncio.wait({failed}, timeout=_CLOSE)
            raise TimeoutError(f"no connection within {_CONNECT:.0f} s")
        raise failed.result()

    async def another(self) -> Self:
        """Connect again, with the same parameters.

        Raises:
            AMQPError, OSError: the connection can't be opened.
        """
        return await self.open(self._connection.params)

    @property
    def is_open(self) -> bool:
        """Whether the connection can be used."""
        return not self._aborted and bool(self._connection.is_open)

    @property
    def server_version(self) -> tuple[int, ...]:
        """RabbitMQ's version; empty if RabbitMQ doesn't report it."""
        version = str((self._connection.server_properties or {}).get("version", ""))
        return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())

    async def channel(self) -> Channel:
        """Open a channel.

        Raises:
            AMQPError, OSError: the connection is lost.
        """
        loop = asyncio.get_running_loop()
        opened, closed = loop.create_future(), loop.create_future()
        raw = self._connection.channel(on_open_callback=lambda c: _settle(opened, c))
        raw.add_on_close_callback(lambda _, why: _settle(closed, why))
        await asyncio.wait(
            {opened, closed}, timeout=_ANSWER, return_when=asyncio.FIRST_COMPLETED
        )
        if closed.done():
            raise closed.result()
        if not opened.done():
            raise TimeoutError(f"no answer within {_ANSWER:.0f} s")
        return Channel(raw, closed)

    async def channel_with_exchange(self, exchange: str) -> Channel:
        """Open a channel, and create the durable topic exchange if it is missing.

        Raises:
            AMQPError, OSError: the connection is lost.
            ConfigError: the exchange is missing, and can't be created.
        """
        channel = await self.channel()
        try:
            await channel.ask(
                channel.pika.exchange_declare, exchange=exchange, passive=True
            )
        except ChannelClosedByBroker as error:
            if error.reply_code != NOT_FOUND:
                raise ConfigError(
                    f"exchange {exchange!r}: {error.reply_text}"
                ) from None
        else:
            return channel
        channel = await self.channel()
        try:
            await channel.ask(
                channel.pika.exchange_declare,
                exchange=exchange,
                exchange_type="topic",
                durable=True,
            )
        except ChannelClosedByBroker as error:
            raise ConfigError(
                f"exchange {exchange!r} doesn't exist and can't be created: "
                f"{error.reply_text}"
            ) from None
        return channel

    async def close(self) -> None:
        """Disconnect, gracefully if the server answers in time."""
        if self.is_open:
            self._connection.close()
            try:
                await asyncio.wait({self._lost}, timeout=_CLOSE)
            finally:
                self.abort()
        await asyncio.wait({self._lost}, timeout=_CLOSE)

    def abort(self) -> None:
        """Disconnect without asking the server."""
        if not self._aborted and not self._lost.done():
            self._aborted = True
            self._connection.abort()

    def _on_blocked(self, _: object, frame: Any) -> None:
        _settle(self.blocked, str(frame.method.reason))

    def _on_unblocked(self, *_: object) -> None:
        self.blocked = asyncio.get_running_loop().create_future()


class _Connection(AsyncioConnection):
    """Pika's connection, with one write for all frames of a loop iteration.

    Otherwise, each frame costs a system call and a packet. A message has three frames,
    so this would cost up to half of the rate. The overridden methods are those that
    pika expects each adapter to implement.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._frames: list[bytes] = []
        super().__init__(*args, **settings)

    def abort(self) -> None:
        """Close at once; the callbacks run soon afterwards."""
        if not self.is_closed:
            self._terminate_stream(AMQPConnectionError("closed by pillarbox"))

    @override
    def _read_frame(self) -> tuple[int, Any]:
        return read_frame(self._frame_buffer)

    @override
    def _adapter_emit_data(self, data: bytes) -> None:
        if not self._frames:
            asyncio.get_running_loop().call_soon(self._flush)
        self._frames.append(data)

    @override
    def _adapter_disconnect_stream(self) -> None:
        self._flush()
        super()._adapter_disconnect_stream()

    def _flush(self) -> None:
        data = b"".join(self._frames)
        self._frames.clear()
        if data and self._transport is not None:
            super()._adapter_emit_data(data)


class _IOServices(_AsyncioIOServicesAdapter):
    """Pika's I/O services, but a cancelled look-up is never answered.

    Pika answers a look-up even if it is cancelled between its end and its callback.
    Its connection workflow, abandoned by then, continues with the answer: it connects a
    socket that nobody closes.
    """

    @override
    def getaddrinfo(
        self,
        host: str,
        port: int,
        on_done: Callable[..., None],
        family: int = 0,
        socktype: int = 0,
        proto: int = 0,
        flags: int = 0,
    ) -> AbstractIOReference:
        lookup = _Lookup(on_done)
        lookup.pending = super().getaddrinfo(
            host, port, lookup.answer, family, socktype, proto, flags
        )
        return lookup


class _Lookup(AbstractIOReference):
    """A look-up of a host's addresses, which can be cancelled until it is answered."""

    pending: AbstractIOReference

    def __init__(self, on_done: Callable[..., None]) -> None:
        self._on_done = on_done
        self._cancelled = False

    def answer(self, addresses_or_error: object) -> None:
        if not self._cancelled:
            self._on_done(addresses_or_error)

    @override
    def cancel(self) -> bool:
        self._cancelled = True
        return self.pending.cancel()


def _settle(future: "asyncio.Future[Any]", result: object) -> None:
    if not future.done():
        future.set_result(result)


_BODY_SIZE: Final = 4
_PROPERTIES: Final = 12


def read_frame(data: bytes) -> tuple[int, Any]:
    """Return the size of the first frame (0 if bytes are missing), and the frame.

    Tables that are nested too deeply, or a timestamp in milliseconds, make pika raise
    an exception that ends the connection, at each redelivery again. So properties that
    pika can't read become one header with an empty name, which holds their bytes.

    Raises:
        AMQPError: the data isn't an AMQP frame.
    """
    try:
        frame: tuple[int, Any] = decode_frame(data)
    except InvalidFrameError:
        raise
    except Exception:
        kind, channel, size = struct.unpack_from(">BHL", data)
        if kind != spec.FRAME_HEADER:
            raise
        content = data[spec.FRAME_HEADER_SIZE : spec.FRAME_HEADER_SIZE + size]
        (body_size,) = struct.unpack_from(">Q", content, _BODY_SIZE)
        properties = BasicProperties(  # type: ignore[no-untyped-call]
            headers={"": content[_PROPERTIES:]}
        )
        header = Header(channel, body_size, properties)
        return spec.FRAME_HEADER_SIZE + size + spec.FRAME_END_SIZE, header
    return frame
