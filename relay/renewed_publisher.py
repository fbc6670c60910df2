"""A publisher that reads its URL's file again after a failure, for rotated secrets."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Self, cast

from pillarbox.outbox import tracing
from pillarbox.outbox.brokers.options import identity_of
from pillarbox.outbox.brokers.plugins import implementation
from pillarbox.outbox.errors import BrokerUnavailableError, OutboxError, RefusedError
from pillarbox.outbox.message import Message
from pillarbox.outbox.url import FileUrl
from pillarbox.relay.publisher import (
    Appending,
    Checkable,
    Confirmation,
    InDatabase,
    Publisher,
)


def publisher_of(broker: str) -> Publisher:
    """Create the publisher of a broker's URL; it is renewed if that is in a file."""
    if isinstance(broker, FileUrl):
        return RenewedPublisher(broker, publisher_of)
    found = implementation("pillarbox.publishers", broker)
    return cast("Publisher", found(broker))


class RenewedPublisher:
    """Publishes through a publisher, and replaces it if the URL in the file changes.

    The file is read again before each call that follows a failed one.
    """

    def __init__(self, url: FileUrl, make: Callable[[str], Publisher]) -> None:
        self._file = url
        self._make = make
        self._used = url.current()
        self._publisher = make(self._used)
        self._has_failed = False
        self._turn = asyncio.Lock()
        self.messaging_system = tracing.system_of(self._publisher)
        if isinstance(self._publisher, Checkable):
            # An instance without it is not `Checkable`, like what it wraps.
            self.check = self._check
        if isinstance(self._publisher, InDatabase):
            self.in_database = True
        self.appends_to: str | None = None

    async def __aenter__(self) -> Self:
        """Enter the publisher.

        Raises:
            BrokerUnavailableError: the credentials, which may be rotated, are refused.
        """
        try:
            await self._publisher.__aenter__()
        except RefusedError as error:
            raise BrokerUnavailableError(str(error)) from error
        if isinstance(self._publisher, Appending):
            self.appends_to = self._publisher.appends_to
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Leave the publisher."""
        await self._publisher.__aexit__(*exc_info)

    async def publish(self, batch: Sequence[Message]) -> Sequence[Confirmation]:
        """Publish through the publisher, or through one for the file's present URL."""
        async with self._renewed() as publisher:
            return await publisher.publish(batch)

    async def _check(self) -> None:
        async with self._renewed() as publisher:
            assert isinstance(publisher, Checkable)
            await publisher.check()

    @asynccontextmanager
    async def _renewed(self) -> AsyncIterator[Publisher]:
        if self._has_failed:
            await self._renew()
        try:
            yield self._publisher
        except BaseException:
            self._has_failed = True
            raise
        self._has_failed = False

    async def _renew(self) -> None:
        async with self._turn:
            try:
                url = self._file.current()
                if url == self._used:
                    return
                if identity_of(url) != identity_of(self._used):
                    raise BrokerUnavailableError(
                        f"{self._file.variable} now names another broker; restart the"
                        " relay to use it"
                    )
                renewed = self._make(url)
                await renewed.__aenter__()
            except OutboxError as error:
                raise BrokerUnavailableError(str(error)) from error
            replaced, self._publisher, self._used = self._publisher, renewed, url
            await replaced.__aexit__(None, None, None)
