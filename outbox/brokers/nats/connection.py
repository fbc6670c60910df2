"""A connection to NATS with JetStream, for the publisher and the source."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError

from pillarbox.outbox.brokers.nats.client import NatsClient
from pillarbox.outbox.brokers.nats.settings import NatsSettings
from pillarbox.outbox.errors import BrokerUnavailableError, ConfigError
from pillarbox.outbox.gather import cancellable

_CONNECT: Final = 5.0
_ANSWER: Final = 5.0
_CLOSE: Final = 2.0
_PING_INTERVAL: Final = 10
_NOT_FOUND: Final = 404
_NO_JETSTREAM: Final = frozenset({10039, 10076})


class ApiError(Exception):
    """An error that JetStream returns for a request."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        self.code: int = error.get("code", 0)
        self.number: int = error.get("err_code", 0)
        super().__init__(str(error.get("description", error)))


@contextmanager
def nats_errors(settings: NatsSettings) -> Iterator[None]:
    """Raise `BrokerUnavailableError` if NATS is unavailable or no longer suitable."""
    try:
        yield
    except ConfigError as error:
        raise BrokerUnavailableError(str(error)) from error
    except (NatsError, ApiError, OSError) as error:
        raise settings.unavailable(error) from error


def publish_command(subject: str, reply: str, headers: bytes, payload: bytes) -> bytes:
    """Return the command that publishes a message with headers."""
    size = len(headers) + len(payload)
    start = f"HPUB {subject} {reply} {len(headers)} {size}\r\n".encode()
    return b"".join((start, headers, payload, b"\r\n"))


class NatsConnection:
    """One connection, which isn't used again once it is lost.

    Args:
        on_lost: called once, with the reason why the connection ended.
        on_refusal: called with NATS's message when the user's permissions forbid
            something.

    Attributes:
        lost: why the connection ended; None while it is open.
        error: the last one that the client reported.
    """

    def __init__(
        self,
        settings: NatsSettings,
        *,
        on_lost: Callable[[BrokerUnavailableError], None],
        on_refusal: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.client = NatsClient(secure=settings.secure)
        self.lost: BrokerUnavailableError | None = None
        self._settings = settings
        self._on_lost = on_lost
        self._on_refusal = on_refusal
        self.error: Exception | None = None

    async def open(self) -> None:
        """Connect, and make sure that JetStream and the stream are available.

        Raises:
            BrokerUnavailableError: NATS is unreachable, or rejects the connection.
            ConfigError: there is no JetStream, or no such stream.
        """
        settings = self._settings
        try:
            async with asyncio.timeout(_CONNECT):
                with cancellable():
                    await self.client.connect(
                        servers=settings.servers,
                        name="pillarbox",
                        error_cb=self._failed,
                        closed_cb=self._closed,
                        # The caller reconnects: it must know what was in flight.
                        allow_reconnect=False,
                        max_reconnect_attempts=1,
                        reconnect_time_wait=0,
                        connect_timeout=int(_CONNECT),
                        ping_interval=_PING_INTERVAL,
                        user=settings.user if settings.password is not None else None,
                        password=settings.password,
                        token=settings.user if settings.password is None else None,
                        tls=settings.tls,
                        user_credentials=settings.options.creds,
                        inbox_prefix=settings.options.inbox_prefix,
                        # Otherwise the client waits for the server within a batch.
                        pending_size=0,
                    )
            await self.ready()
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"creds= needs the module {error.name!r}: run pip install nkeys"
            ) from None
        except (NatsError, OSError) as error:
            await self.drop()
            raise settings.unavailable(self.error or error) from error
        except BaseException:
            await self.drop()
            raise

    async def drop(
        self, reason: object = "connection closed"
    ) -> BrokerUnavailableError:
        """Close at once, dropping unflushed data; return the error to raise."""
        lost = self._end(self._settings.unavailable(reason))
        # A half-closed client would keep its tasks forever.
        await asyncio.shield(self._close())
        return lost

    async def _close(self) -> None:
        with suppress(NatsError, OSError, TimeoutError, AssertionError):
            async with asyncio.timeout(_CLOSE):
                await self.client.close()

    async def ask(self, what: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request to JetStream's API, and return the answer.

        Raises:
            ApiError: JetStream returned an error.
            BrokerUnavailableError: there was no answer.
        """
        subject = f"{self._settings.api}.{what}"
        request = json.dumps(body or {}).encode()
        try:
            with cancellable():
                message = await self.client.request(subject, request, timeout=_ANSWER)
        except NoRespondersError:
            raise self._settings.unavailable(
                "JetStream isn't available: enable it in the server's configuration, "
                "or wait until the cluster has elected a leader"
            ) from None
        except NatsTimeoutError:
            raise self._settings.unavailable(
                self.error or f"no answer to {subject}; may the user publish to it?"
            ) from None
        except (NatsError, OSError) as error:
            raise self._settings.unavailable(error) from error
        answer = json.loads(message.data)
        if "error" in answer:
            raise ApiError(answer["error"])
        return answer

    async def streams(self, name: str | None = None) -> Sequence[Mapping[str, Any]]:
        """Describe a stream, by default that of the URL, or if it names none, 256.

        Empty if the user isn't allowed to ask.
        """
        name = name or self._settings.options.stream
        try:
            if name is not None:
                return [await self.ask(f"STREAM.INFO.{name}")]
            return (await self.ask("STREAM.LIST"))["streams"] or []
        except (ApiError, BrokerUnavailableError):
            return []

    async def flush(self) -> None:
        """Return when the server has received everything that was published.

        Raises:
            BrokerUnavailableError: that takes longer than 5 s, or fails.
        """
        try:
            async with asyncio.timeout(_ANSWER):
                # The client's own flush overtakes what waits to be written.
                await self.client.written()
                with cancellable():
                    await self.client.flush()
        except (NatsError, OSError, TimeoutError) as error:
            raise self.lost or self._settings.unavailable(error) from error

    async def ready(self) -> bool:
        """Check JetStream and the stream; return whether the stream was just created.

        Raises:
            BrokerUnavailableError: there was no answer.
            ConfigError: the stream is missing, and the options don't say to create it.
        """
        options = self._settings.options
        stream, create = options.stream, options.create
        try:
            if stream is None:
                await self.ask("INFO")
                return False
            try:
                await self.ask(f"STREAM.INFO.{stream}")
            except ApiError as error:
                if error.code != _NOT_FOUND or not create:
                    raise
                await self.ask(
                    f"STREAM.CREATE.{stream}",
                    {"name": stream, "subjects": create, "storage": "file"},
                )
            else:
                return False
        except ApiError as error:
            if error.number in _NO_JETSTREAM:
                remedy = "enable JetStream for the account of this user"
            elif error.code == _NOT_FOUND:
                remedy = "create the stream, or add create=SUBJECTS to the URL"
            elif create:
                remedy = "create the stream yourself, or correct create="
            else:
                raise self._settings.unavailable(error) from error
            raise ConfigError(
                f"broker {self._settings.name}: stream {stream!r}: {error}; {remedy}"
            ) from error
        return True

    async def _failed(self, error: Exception) -> None:
        self.error = error
        if "permissions violation" in str(error):
            self._on_refusal(str(error).removeprefix("nats: "))

    async def _closed(self) -> None:
        last = self.client.last_error
        reason = self.error or (last and last.__cause__) or last or "connection lost"
        self._end(self._settings.unavailable(reason))

    def _end(self, reason: BrokerUnavailableError) -> BrokerUnavailableError:
        if self.lost is None:
            self.lost = reason
            self._on_lost(reason)
        return self.lost


@dataclass(slots=True, eq=False, kw_only=True)
class NatsLink:
    """The connection of a publisher or source, which is replaced once it is lost.

    Attributes:
        owner: its name in error messages.
        prepare: called with each new connection before it is used.
        on_lost, on_refusal: as of `NatsConnection`.
    """

    settings: NatsSettings
    owner: str
    prepare: Callable[[NatsConnection], Awaitable[None]]
    on_lost: Callable[[BrokerUnavailableError], None]
    on_refusal: Callable[[str], None]
    _is_open: bool = False
    _connection: NatsConnection | None = None
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def open(self) -> NatsConnection:
        """Connect, and let `connected` do so again; raises the same errors."""
        self._is_open = True
        return await self.connected()

    async def connected(self) -> NatsConnection:
        """Return the connection, or a new one if that is lost.

        Raises:
            BrokerUnavailableError: NATS is unreachable, or rejects the connection.
            ConfigError: there is no JetStream, or `prepare` raised it.
        """
        async with self._turn:
            if not self._is_open:
                raise self.settings.unavailable(f"the {self.owner} is closed")
            if self._connection is not None and self._connection.lost is None:
                return self._connection
            connection = NatsConnection(
                self.settings, on_lost=self.on_lost, on_refusal=self.on_refusal
            )
            await connection.open()
            try:
                await self.prepare(connection)
            except BaseException as error:
                await connection.drop()
                if isinstance(error, NatsError | ApiError):
                    raise self.settings.unavailable(error) from error
                raise
            self._connection = connection
            return connection

    async def close(self) -> None:
        """Disconnect, until `open` is called again."""
        self._is_open = False
        async with self._turn:
            if self._connection is not None:
                await self._connection.drop(f"the {self.owner} is closed")
