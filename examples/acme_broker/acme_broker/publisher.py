"""The publisher: a batch is one transaction, so either all of it arrives or nothing."""

import json
from collections.abc import Sequence
from typing import Self

from pillarbox import Message
from pillarbox.outbox.cloudevents.headers import to_headers
from pillarbox.outbox.errors import BrokerUnavailableError
from pillarbox.relay.publisher import Acked, Confirmation, Nacked

from .queue import Queue

MAX_PAYLOAD_BYTES = 1024 * 1024
PREFIX = "ce-"


class AcmePublisher:
    """Appends messages; acks a message published before without appending it again."""

    def __init__(self, url: str) -> None:
        self._queue = Queue(url)
        self._entered = False

    async def __aenter__(self) -> Self:
        self._queue.create()
        self._entered = True
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._entered = False

    async def publish(self, batch: Sequence[Message]) -> Sequence[Confirmation]:
        """Append the batch, except messages that are too large."""
        if not self._entered:
            raise BrokerUnavailableError("the publisher is not open; use `async with`")
        answers = [_check(message) for message in batch]
        with self._queue.transaction() as connection:
            connection.executemany(
                "INSERT INTO message (id, topic, key, headers, payload)"
                " VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING",
                [
                    (
                        str(message.id),
                        message.topic,
                        message.key,
                        json.dumps(to_headers(message, PREFIX)),
                        message.payload,
                    )
                    for message, answer in zip(batch, answers, strict=True)
                    if isinstance(answer, Acked)
                ],
            )
        return answers


def _check(message: Message) -> Confirmation:
    size = len(message.payload)
    if size <= MAX_PAYLOAD_BYTES:
        return Acked()
    return Nacked(
        f"payload has {size} bytes, limit {MAX_PAYLOAD_BYTES}", permanent=True
    )
