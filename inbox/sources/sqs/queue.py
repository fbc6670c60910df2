"""The calls that receive from an Amazon SQS queue and settle its messages."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from botocore.exceptions import ClientError

from pillarbox.inbox.consuming.keeper import Held
from pillarbox.inbox.poison.history import FIRST_DELIVERY, REDELIVERED
from pillarbox.outbox.brokers.sqs.connection import (
    DENIED,
    MISSING,
    SqsSettings,
    code_of,
    is_fifo,
    resource_name,
)
from pillarbox.outbox.brokers.sqs.message import read
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.gather import gather

MAX_RECEIVED: Final = 10
_MAX_HOLD: Final = 12 * 3600 - 60.0
_DELETE: Final = "delete_message_batch"
_HIDE: Final = "change_message_visibility_batch"
_TOPIC: Final = "{topic}"
_CONSUMER: Final = "{consumer}"
_ATTRIBUTES: Final = ["ApproximateReceiveCount", "MessageGroupId", "SentTimestamp"]


@dataclass(slots=True, eq=False, kw_only=True)
class Received(Held):
    """A message that this replica holds until its visibility timeout ends.

    Attributes:
        at: its receipt handle.
        place: its position among the messages received; it orders a group.
        key: the queue and group of a FIFO message; None if it is unordered.
        ours_until: when it reaches AWS's limit on how long a message can be held.
    """

    queue: "SqsQueue"
    ours_until: float


class SqsQueue:
    """One queue; its methods raise the errors in `BROKEN`."""

    def __init__(self, client: Any, name: str, url: str) -> None:
        self.name = name
        self.fifo = is_fifo(name)
        self._client = client
        self._url = url

    @classmethod
    async def find(cls, client: Any, name: str, settings: SqsSettings) -> "SqsQueue":
        """Find a queue by its name.

        Raises:
            ConfigError: the queue doesn't exist, or the privilege to use it is missing.
        """
        account = settings.options.account
        owner = {"QueueOwnerAWSAccountId": account} if account else {}
        try:
            answer = await client.get_queue_url(QueueName=name, **owner)
        except ClientError as error:
            code = code_of(error)
            if code not in MISSING | DENIED:
                raise
            verb = "forbids" if code in DENIED else "has no"
            raise ConfigError(
                f"broker {settings.url} {verb} queue {name}: create it, or grant "
                "sqs:GetQueueUrl, ReceiveMessage, DeleteMessage and "
                "ChangeMessageVisibility"
            ) from None
        return cls(client, name, answer["QueueUrl"])

    async def receive(
        self, limit: int, *, wait: int, visibility: int, numbers: Iterator[int]
    ) -> list[Received]:
        """Wait up to `wait` seconds for up to ten messages."""
        answer = await self._client.receive_message(
            QueueUrl=self._url,
            MaxNumberOfMessages=min(limit, MAX_RECEIVED),
            WaitTimeSeconds=wait,
            VisibilityTimeout=visibility,
            MessageAttributeNames=["All"],
            MessageSystemAttributeNames=_ATTRIBUTES,
        )
        now = time.monotonic()
        received = []
        for found in answer.get("Messages", ()):
            message, problem = read(
                found["Body"], found.get("MessageAttributes", {}), place=self.name
            )
            system = found.get("Attributes", {})
            group, sent = system.get("MessageGroupId"), system.get("SentTimestamp")
            times = int(system.get("ApproximateReceiveCount", 1))
            received.append(
                Received(
                    queue=self,
                    at=found["ReceiptHandle"],
                    message=message,
                    history=REDELIVERED if times > 1 else FIRST_DELIVERY,
                    problem=problem,
                    place=next(numbers),
                    key=f"{self.name} {group}" if self.fifo and group else None,
                    until=now + visibility,
                    ours_until=now + _MAX_HOLD,
                    published_at=None if sent is None else int(sent) / 1000,
                )
            )
        return received

    async def call(self, name: str, entries: Sequence[dict[str, Any]]) -> Any:
        """Call a method of the client for up to ten messages, and return the answer."""
        return await getattr(self._client, name)(QueueUrl=self._url, Entries=entries)


async def settle(outcomes: Mapping[Received, float | None]) -> dict[Received, str]:
    """Delete messages of any queues, or make them visible after a number of seconds.

    A message can't stay invisible beyond AWS's limit. Returns those for which that
    failed, each with its error code.
    """
    now = time.monotonic()
    groups: dict[tuple[SqsQueue, str], list[Received]] = {}
    hidden: dict[Received, int] = {}
    for item, seconds in outcomes.items():
        if seconds is not None:
            hidden[item] = max(0, math.ceil(min(seconds, item.ours_until - now)))
        name = _DELETE if seconds is None else _HIDE
        groups.setdefault((item.queue, name), []).append(item)
    failed: dict[Received, str] = {}

    async def settle_ten(queue: SqsQueue, name: str, items: Sequence[Received]) -> None:
        entries: list[dict[str, Any]] = [
            {"Id": str(index), "ReceiptHandle": item.at}
            for index, item in enumerate(items)
        ]
        if name == _HIDE:
            for entry, item in zip(entries, items, strict=True):
                entry["VisibilityTimeout"] = hidden[item]
        for result in (await queue.call(name, entries)).get("Failed", ()):
            failed[items[int(result["Id"])]] = result["Code"]

    await gather(
        settle_ten(queue, name, items[start : start + MAX_RECEIVED])
        for (queue, name), items in groups.items()
        for start in range(0, len(items), MAX_RECEIVED)
    )
    for item, left in hidden.items():
        if item not in failed:
            item.until = now + left
    return failed


def queue_names(
    pattern: str | None, settings: SqsSettings, consumer: str, topics: Sequence[str]
) -> list[str]:
    """Return the names of the consumer's queues.

    Args:
        pattern: a name with `{topic}`, `{consumer}` or both; None: the default.

    Raises:
        ConfigError: SQS doesn't allow such names, or they depend on unknown topics.
    """
    if pattern is None:
        pattern = _TOPIC if settings.service == "sqs" else f"{_CONSUMER}-{_TOPIC}"
    text = (settings.options.queue_prefix or "") + pattern.replace(_CONSUMER, consumer)
    names: dict[str, None] = {}
    for topic in topics:
        if topic.endswith("*") and _TOPIC in text:
            raise ConfigError(
                f"topic {topic}: SQS has no queues by prefix; name one queue for all "
                "topics of the consumer by queue=NAME, or each topic"
            )
        try:
            name = resource_name(
                text.replace(_TOPIC, topic), fifo=settings.options.fifo
            )
        except ValueError as problem:
            raise ConfigError(f"topic {topic}: {problem}") from None
        names[name] = None
    return list(names)
