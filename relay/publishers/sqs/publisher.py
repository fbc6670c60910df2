"""A publisher for Amazon SQS and SNS: a topic maps to a queue or an SNS topic.

A request carries up to ten messages; requests are sent in parallel. A standard queue
doesn't guarantee order.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Final, Self

from pillarbox.outbox.brokers.sqs.connection import BROKEN, SqsSettings
from pillarbox.outbox.brokers.sqs.message import group_of, typed, write
from pillarbox.outbox.errors import BrokerUnavailableError, InvalidMessageError
from pillarbox.outbox.gather import gather
from pillarbox.outbox.message import Message
from pillarbox.relay.answers import Answers, PublishedIds
from pillarbox.relay.publisher import Acked, Confirmation, Nacked, nack_too_large
from pillarbox.relay.publishers.sqs.destination import (
    Destination,
    Queues,
    Service,
    Topics,
)
from pillarbox.relay.publishers.sqs.sending import Entry, Sending, refusal_of

_ANSWER: Final = 10.0
# Destinations are looked up again after this time, since a limit may have changed.
_FRESH: Final = 300.0


class SqsPublisher:
    """Publishes to existing queues or topics.

    Args:
        settings: the settings in the broker URL.

    Attributes:
        messaging_system: the broker's name in traces.
    """

    def __init__(self, settings: SqsSettings) -> None:
        options = settings.options
        self.messaging_system = {"sqs": "aws_sqs", "sns": "aws.sns"}[settings.service]
        self.identity = settings.identity
        self._settings = settings
        self._fifo = options.fifo
        self._max_payload_bytes = options.max_payload_bytes
        self._in_flight = options.in_flight
        self._turn = asyncio.Semaphore(options.in_flight)
        services: dict[str, type[Service]] = {"sqs": Queues, "sns": Topics}
        self._service = services[settings.service](settings)
        self._found: dict[str, tuple[float, Destination]] = {}
        self._published = PublishedIds()
        self._exit = AsyncExitStack()
        self._client: Any = None

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Create a publisher from `sqs://region/?option=…` or `sns://region/?option=…`.

        Raises:
            ConfigError: the URL can't be used.
        """
        return cls(SqsSettings.from_url(url))

    async def __aenter__(self) -> Self:
        """Connect.

        Raises:
            BrokerUnavailableError: AWS is unreachable.
            ConfigError: the credentials or the region are missing or wrong.
        """
        self._client = await self._settings.open(
            self._exit,
            self._service.connect,
            service=self._settings.service,
            connections=self._in_flight,
            read_timeout=_ANSWER,
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Disconnect."""
        self._client = None
        await self._exit.aclose()

    async def publish(self, batch: Sequence[Message]) -> Sequence[Confirmation]:
        """Send the batch in requests of up to ten messages, each key in order.

        Raises:
            BrokerUnavailableError: AWS is unreachable, is at fault or accepts nothing
                at the moment, or the publisher is not open. The next call
                reconnects. This publisher doesn't resend messages that AWS accepted
                before the error.
        """
        client = self._client
        if client is None:
            raise BrokerUnavailableError(
                f"broker {self._settings.url}: the publisher is not open; "
                "use `async with`"
            )
        topics = {message.topic for message in batch}
        found = await gather(self._find(client, topic) for topic in topics)
        places = dict(zip(topics, found, strict=True))
        made = [self._entry(i, m, places[m.topic]) for i, m in enumerate(batch)]
        entries = {i: each for i, each in enumerate(made) if isinstance(each, Entry)}
        answers: Answers[Confirmation] = Answers(
            batch, (None if isinstance(each, Entry) else each for each in made)
        )
        sending = Sending(self._service, self._settings, self._turn, answers)
        with self._published.kept(answers):
            await sending.send(client, entries)
        if self._client is not client:
            raise BrokerUnavailableError(
                f"broker {self._settings.url}: the publisher is closed"
            )
        return answers.complete()

    def _entry(
        self, index: int, message: Message, place: Destination | Nacked
    ) -> Entry | Confirmation:
        if self._published.pop(message.id):
            return Acked()
        if too_large := nack_too_large(message.payload, self._max_payload_bytes):
            return too_large
        if isinstance(place, Nacked):
            return place
        try:
            written = write(message)
        except InvalidMessageError as error:
            return Nacked(str(error), permanent=True)
        if written.size > place.max_bytes:
            return Nacked(
                f"message has {written.size} bytes with its attributes, the limit of "
                f"{self._service.kind} {place.name} is {place.max_bytes}",
                permanent=True,
            )
        fields: dict[str, Any] = {
            self._service.body: written.body,
            "MessageAttributes": typed(written.attributes),
        }
        if self._fifo:
            fields["MessageGroupId"] = group_of(message)
            fields["MessageDeduplicationId"] = str(message.id)
        line = index if message.key is None else message.key
        return Entry(index, line, place, written.size, fields)

    async def _find(self, client: Any, topic: str) -> Destination | Nacked:
        found = self._found.get(topic)
        if found is not None and time.monotonic() < found[0]:
            return found[1]
        try:
            name = self._settings.name_of(topic)
        except ValueError as problem:
            return Nacked(f"topic: {problem}", permanent=True)
        try:
            async with self._turn:
                destination = await self._service.find(client, name)
        except BROKEN as error:
            refusal = refusal_of(error, f"{self._service.kind} {name}")
            if refusal is None:
                raise self._settings.unavailable(error) from error
            return refusal
        self._found[topic] = (time.monotonic() + _FRESH, destination)
        return destination
