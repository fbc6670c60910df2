"""A publisher that appends to a list, for tests and for measuring the relay alone."""

from collections.abc import Sequence
from typing import Self

from pillarbox.outbox.brokers.memory import MemoryOptions
from pillarbox.outbox.errors import BrokerUnavailableError, ConfigError
from pillarbox.outbox.message import Message
from pillarbox.outbox.url import without_password
from pillarbox.relay.publisher import Acked, Confirmation


class MemoryPublisher:
    """Acks every message and keeps it in `messages`, in order of arrival.

    `memory://` keeps the messages, `memory://drop` discards them.
    """

    def __init__(self, *, keep: bool = True) -> None:
        self.messages: list[Message] = []
        self.identity = "memory://" if keep else "memory://drop"
        self._keep = keep
        self._entered = False

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Create a publisher from `memory://` or `memory://drop`.

        Raises:
            ConfigError: the URL is neither of them.
        """
        url, _ = MemoryOptions.parse(url)
        where = url.removeprefix("memory:").strip("/")
        if not url.startswith("memory:") or where not in {"", "drop"}:
            raise ConfigError(
                f"broker URL {without_password(url)!r}: write memory:// to keep "
                "the messages or memory://drop to forget them"
            )
        return cls(keep=not where)

    async def __aenter__(self) -> Self:
        """Enter the publisher; there is nothing to connect to."""
        self._entered = True
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Leave the publisher; there is nothing to disconnect from."""
        self._entered = False

    async def publish(self, batch: Sequence[Message]) -> Sequence[Confirmation]:
        """Ack the whole batch.

        Raises:
            BrokerUnavailableError: the publisher is not open.
        """
        if not self._entered:
            raise BrokerUnavailableError(
                "broker memory: the publisher is not open; use `async with`"
            )
        if self._keep:
            self.messages.extend(batch)
        return [Acked()] * len(batch)
