"""What Kafka shows of a consumer group before a member joins it."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from confluent_kafka import (
    ConsumerGroupState,
    KafkaError,
    KafkaException,
    TopicPartition,
    admin,
)

from inbox.handlers.routes import overlap

PREFIX: Final = "pillarbox-"
"""Of the `client.id` of members; the id of the handlers' database follows."""
_ANSWER: Final = 3.0
_PAUSE: Final = 0.1
# A coordinator that has just started is still loading its groups.
_SOON: Final = {
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
}
_OFFSET: Final[Any] = vars(admin)["OffsetSpec"]  # it has no types


def look_around(
    config: Mapping[str, Any], topics: Sequence[str], own_id: str
) -> tuple[int, list[str]]:
    """Return what a new group begins with, and the members with another database.

    Blocks for some seconds at most. What the user isn't allowed to see counts as none.
    """
    group = str(config["group.id"])
    with suppress(KafkaException, TimeoutError):
        client = admin.AdminClient(dict(config))
        found, old = _describe(client, group), 0
        if found.state in (ConsumerGroupState.DEAD, ConsumerGroupState.UNKNOWN):
            old = _count(client, topics)
        names = {each.client_id for each in found.members}
        return old, sorted(
            name
            for name in names
            if name.startswith(PREFIX) and name != f"{PREFIX}{own_id}"
        )
    return 0, []


def _describe(client: admin.AdminClient, group: str) -> Any:
    until = time.monotonic() + _ANSWER
    while True:
        asked = client.describe_consumer_groups([group], request_timeout=_ANSWER)
        try:
            return asked[group].result(_ANSWER)
        except KafkaException as error:
            if error.args[0].code() not in _SOON or time.monotonic() > until:
                raise
            time.sleep(_PAUSE)


def _count(client: admin.AdminClient, topics: Sequence[str]) -> int:
    known = client.list_topics(timeout=_ANSWER).topics
    parts = [
        (name, number)
        for name, topic in known.items()
        if name in topics or any(overlap(topic, name) for topic in topics)
        for number in topic.partitions
    ]
    ends = []
    for spec in (_OFFSET.latest(), _OFFSET.earliest()):
        wanted = {TopicPartition(*part): spec for part in parts}
        answers = client.list_offsets(wanted, request_timeout=_ANSWER)
        ends.append(sum(it.result(_ANSWER).offset for it in answers.values()))
    return ends[0] - ends[1] if parts else 0
