"""Whether the topics of a consumer are there, before it joins its group."""

import asyncio
from collections.abc import Sequence
from typing import Final

from confluent_kafka import KafkaError

from inbox.sources.kafka.reader import Reader
from outbox.brokers.kafka.connection import reason_of
from outbox.errors import ConfigError, shorten

_CONNECT: Final = 10.0
_CREATION: Final = 2.0
_PAUSE: Final = 0.1


async def require_topics(reader: Reader, topics: Sequence[str], name: str) -> None:
    """Make sure that topics are there, those that aren't beginnings.

    Args:
        name: of the broker, for errors.

    Raises:
        BrokerUnavailableError: nobody tells.
        ConfigError: one isn't there, or we may not read it.
    """
    now = asyncio.get_running_loop().time
    until = now() + _CONNECT
    found = await reader.topics(until)
    creation = now() + _CREATION
    for topic in topics:
        if topic in found or topic.endswith("*"):
            continue
        while True:
            error = (await reader.topics(until, topic)).get(topic)
            code = None if error is None else error.code()
            if code != KafkaError.UNKNOWN_TOPIC_OR_PART or now() >= creation:
                break
            # It may just be on its way into being, because we asked.
            await asyncio.sleep(_PAUSE)
        if error is not None and code != KafkaError.LEADER_NOT_AVAILABLE:
            raise ConfigError(
                f"broker {name}, topic {shorten(topic)}: {reason_of(error)}; "
                "create it, or let this user read it"
            )
