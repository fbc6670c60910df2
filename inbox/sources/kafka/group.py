"""Kafka's information about a consumer group before a member joins it."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from confluent_kafka import ConsumerGroupState, KafkaException, TopicPartition, admin

from pillarbox.inbox.handlers.routes import overlap

_ANSWER: Final = 3.0
_OFFSET: Final[Any] = vars(admin)["OffsetSpec"]  # it has no types


def look_around(
    config: Mapping[str, Any], topics: Sequence[str]
) -> tuple[int, list[str]]:
    """Return how many messages a new group begins with, and the members' names.

    Blocks for some seconds at most. What the user isn't allowed to see counts as none.
    """
    group = str(config["group.id"])
    with suppress(KafkaException, TimeoutError):
        client = admin.AdminClient(dict(config))
        asked = client.describe_consumer_groups([group], request_timeout=_ANSWER)
        found = asked[group].result(_ANSWER)
        is_new = found.state in (ConsumerGroupState.DEAD, ConsumerGroupState.UNKNOWN)
        old = _count(client, topics) if is_new else 0
        return old, [each.client_id for each in found.members]
    return 0, []


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
