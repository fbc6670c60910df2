"""A publisher that posts each message to a webhook, as a signed CloudEvent.

HTTP has no batches: messages of a key are posted one at a time, each after a 2xx
response to the previous one. Keys are posted in parallel, over persistent connections.
"""

import asyncio
import socket
import ssl
from collections.abc import Mapping, Sequence
from typing import Final, Self
from uuid import UUID

import aiohttp

from pillarbox.outbox.brokers.http import HttpOptions
from pillarbox.outbox.cloudevents.http import to_request
from pillarbox.outbox.errors import (
    BrokerUnavailableError,
    ConfigError,
    InvalidMessageError,
)
from pillarbox.outbox.message import Message
from pillarbox.relay.answers import Answers, PublishedIds
from pillarbox.relay.publisher import Acked, Confirmation, Nacked, nack_too_large
from pillarbox.relay.publishers.http.address import is_public, socket_maker
from pillarbox.relay.publishers.http.batch import Batch
from pillarbox.relay.publishers.http.host import Host
from pillarbox.relay.publishers.http.post import Mailbox, one_line
from pillarbox.relay.publishers.http.settings import HttpSettings

_CONNECT: Final = 5.0
_MAX_FIELD_BYTES: Final = 64 * 1024
"""The longest status line or header of an answer: proxies add long ones."""


class HttpPublisher:
    """Posts messages to one URL."""

    def __init__(self, settings: HttpSettings) -> None:
        self.identity = HttpOptions.identity(settings.url)
        self._settings = settings
        self._url = settings.target
        self._tls = settings.tls()
        self._name = f"broker {settings.name}"
        self._host = Host(self._name)
        self._slots = asyncio.Semaphore(settings.options.max_connections)
        self._published = PublishedIds()
        self._session: aiohttp.ClientSession | None = None

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Create a publisher from `https://host/path?secret_env=WEBHOOK_SECRET`.

        `secret_env` names the environment variable that holds the secrets, separated by
        white space; `unsigned=true` disables signing. The other options are those of
        `HttpOptions`. The rest of the query is sent to the receiver.

        Raises:
            ConfigError: the URL can't be used, or there is no secret.
        """
        return cls(HttpSettings.from_url(url))

    async def __aenter__(self) -> Self:
        """Open a connection to check that the host accepts it.

        Raises:
            BrokerUnavailableError: the host is unreachable.
            ConfigError: the host is on a private network, or its certificate isn't
                trusted.
        """
        settings = self._settings
        try:
            async with asyncio.timeout(_CONNECT):
                await self._connect()
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(
                f"{self._name}: its certificate isn't trusted: "
                f"{error.verify_message}; pass its CA certificate with ca_file=…"
            ) from error
        except OSError as error:
            raise BrokerUnavailableError(
                f"{self._name} can't be reached: {one_line(error)}"
            ) from error
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=settings.options.max_connections,
                ssl=self._tls or True,
                socket_factory=socket_maker(
                    allow_private=settings.options.allow_private
                ),
            ),
            timeout=aiohttp.ClientTimeout(
                total=settings.options.timeout.total_seconds(),
                sock_connect=_CONNECT,
            ),
            headers={"User-Agent": "pillarbox", "Accept-Encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            max_line_size=_MAX_FIELD_BYTES,
            max_field_size=_MAX_FIELD_BYTES,
            trust_env=False,
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Disconnect."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def publish(self, batch: Sequence[Message]) -> Sequence[Confirmation]:
        """Post the batch: keys in parallel, one message of a key at a time.

        Raises:
            BrokerUnavailableError: the host is unreachable, doesn't respond, requested
                a pause or refuses all messages. This publisher doesn't repost messages
                that the host accepted before the error.
        """
        if self._session is None:
            raise BrokerUnavailableError(
                f"{self._name}: the publisher is not open; use `async with`"
            )
        mailbox = Mailbox(
            self._session,
            self._url,
            self._host,
            self._settings.secrets,
            self._settings.options.max_retry_after.total_seconds(),
        )
        options = self._settings.options
        headers: dict[UUID, Mapping[str, str]] = {}

        def check(message: Message) -> Confirmation | None:
            if self._published.pop(message.id):
                return Acked()
            try:
                headers[message.id] = to_request(message)
            except InvalidMessageError as error:
                return Nacked(str(error), permanent=True)
            return nack_too_large(message.payload, options.max_payload_bytes)

        async def send(i: int) -> Confirmation | None:
            async with self._slots:
                return await mailbox.post(batch[i], headers[batch[i].id])

        answers: Answers[Confirmation] = Answers(batch, map(check, batch))
        width = options.max_connections
        with self._published.kept(answers):
            if answers.left:
                self._host.check_pause()
                await Batch(answers, self._host, send, width=width).run()
        return answers.complete()

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        host, port = self._url.raw_host or "", self._url.port or 0
        infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(info[4][0]) for info in infos]
        if not self._settings.options.allow_private:
            private = addresses
            addresses = list(filter(is_public, addresses))
            if not addresses:
                raise ConfigError(
                    f"{self._name}: {private[0]} is not a public address; add"
                    " allow_private=true to allow webhooks into your own network"
                )
        failure: OSError | None = None
        for address in addresses:
            try:
                _, writer = await asyncio.open_connection(
                    address,
                    port,
                    ssl=self._tls,
                    server_hostname=None if self._tls is None else host,
                )
            except ssl.SSLError:
                raise
            except OSError as error:
                failure = error
            else:
                writer.transport.abort()
                return
        raise failure or OSError("its name doesn't resolve")
