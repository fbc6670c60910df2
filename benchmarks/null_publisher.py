"""A publisher that does nothing, to measure the relay alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pillarbox.outbox.message import Message
from pillarbox.relay.publisher import Acked, Confirmation

ACKED = Acked()


class NullPublisher:
    """Acks every message at once."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Do nothing: there is nothing to close."""

    async def publish(self, batch: Sequence[Message]) -> Sequence[Confirmation]:
        return [ACKED] * len(batch)
