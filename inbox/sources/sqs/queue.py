"""The calls that receive from an Amazon SQS queue and settle its messages."""

import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from botocore.exceptions import ClientError

from outbox.brokers.sqs.connection import (
    DENIED,
    MISSING,
    SqsSettings,
    code_of,
    is_busy,
    is_fifo,
    resource_name,
)
from outbox.brokers.sqs.message import read
from outbox.errors import ConfigError
from outbox.gather import gather
from outbox.message import Message

MAX_RECEIVED: Final = 10
_TOPIC: Final = "{topic}"
_CONSUMER: Final = "{consumer}"
_ATTRIBUTES: Final = ["ApproximateReceiveCount", "MessageGroupId", "SentTimestamp"]


@dataclass(slots=True, eq=False)
class Received:
    """A message that this replica holds until its visibility timeout ends.

    Attributes:
        came_again: whether SQS has delivered it before, to any replica.
        number: its position among the messages received; it orders a group.
        line: the queue and group of a FIFO message; None if it is unordered.
        until: when it becomes visible to other replicas, by the monotonic clock.
        ours_until: when it reaches AWS's limit on how long a message can be held.
        sent_at: when SQS accepted it, in seconds since 1970.
        settled: whether it was acked and only has to be deleted.
        attempts: the number of attempts that failed here.
    """

    queue: "SqsQueue"
    handle: str
    message: Message
    came_again: bool
    problem: str | None
    number: int
    line: tuple[str, str] | None
    until: float
    ours_until: float
    sent_at: float | None
    settled: bool = False
    attempts: int = 0


class SqsQueue:
    """One queue; its methods raise the errors in `BROKEN`."""

    _MAX_HOLD: Final = 12 * 3600 - 60.0

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
            received.append(
                Received(
                    queue=self,
                    handle=found["ReceiptHandle"],
                    message=message,
                    came_again=int(system.get("ApproximateReceiveCount", 1)) > 1,
                    problem=problem,
                    number=next(numbers),
                    line=(self.name, group) if self.fifo and group else None,
                    until=now + visibility,
                    ours_until=now + self._MAX_HOLD,
                    sent_at=None if sent is None else int(sent) / 1000,
                )
            )
        return received

    async def delete(self, received: Sequence[Received]) -> list[Received]:
        """Delete messages; return those whose deletion must be retried."""

        async def ten(entries: Sequence[dict[str, Any]]) -> Mapping[str, Any]:
            answer: Mapping[str, Any] = await self._client.delete_message_batch(
                QueueUrl=self._url, Entries=entries
            )
            return answer

        failed = await _in_tens(received, ten, lambda _: {})
        return [item for item, code in failed if is_busy(code)]

    async def hide(
        self, received: Mapping[Received, int]
    ) -> tuple[list[Received], list[Received]]:
        """Make messages visible again after a number of seconds.

        Returns those to retry, and those that this replica no longer holds.
        """

        async def ten(entries: Sequence[dict[str, Any]]) -> Mapping[str, Any]:
            answer: Mapping[str, Any]
            answer = await self._client.change_message_visibility_batch(
                QueueUrl=self._url, Entries=entries
            )
            return answer

        now = time.monotonic()
        failed = await _in_tens(
            list(received), ten, lambda item: {"VisibilityTimeout": received[item]}
        )
        again = [item for item, code in failed if is_busy(code)]
        lost = [item for item, code in failed if not is_busy(code)]
        for item in received.keys() - {item for item, _ in failed}:
            item.until = now + received[item]
        return again, lost


async def _in_tens(
    received: Sequence[Received],
    call: Callable[[Sequence[dict[str, Any]]], Coroutine[Any, Any, Mapping[str, Any]]],
    more: Callable[[Received], Mapping[str, Any]],
) -> list[tuple[Received, str]]:
    """Call with ten entries at a time; return the failures with their error codes."""
    entries: list[dict[str, Any]] = [
        {"Id": str(index), "ReceiptHandle": item.handle, **more(item)}
        for index, item in enumerate(received)
    ]
    answers = await gather(
        call(entries[start : start + MAX_RECEIVED])
        for start in range(0, len(entries), MAX_RECEIVED)
    )
    failed: Iterable[Mapping[str, Any]] = (
        result for answer in answers for result in answer.get("Failed", ())
    )
    return [(received[int(result["Id"])], result["Code"]) for result in failed]


async def queues_of(
    client: Any, settings: SqsSettings, names: Iterable[str], prefixes: Iterable[str]
) -> dict[str, SqsQueue]:
    """Find the queues with these names, and those whose names have these prefixes.

    Raises:
        ConfigError: no queue has one of the names.
    """
    found = {name: await SqsQueue.find(client, name, settings) for name in names}
    for prefix in prefixes:
        pages = client.get_paginator("list_queues").paginate(
            QueueNamePrefix=prefix, PaginationConfig={"PageSize": 1000}
        )
        async for page in pages:
            for url in page.get("QueueUrls", ()):
                name = url.rpartition("/")[2]
                if is_fifo(name) == settings.options.fifo:
                    found.setdefault(name, SqsQueue(client, name, url))
    return found


async def delete(received: Iterable[Received]) -> list[Received]:
    """Delete messages of any queues; return those whose deletion must be retried."""
    again: list[Received] = []
    for queue, items in _by_queue(received).items():
        again += await queue.delete(items)
    return again


async def hide(
    received: Mapping[Received, int],
) -> tuple[list[Received], list[Received]]:
    """Like `SqsQueue.hide`, for messages of any queues."""
    again: list[Received] = []
    lost: list[Received] = []
    for queue, items in _by_queue(received).items():
        more = await queue.hide({item: received[item] for item in items})
        again += more[0]
        lost += more[1]
    return again, lost


def _by_queue(received: Iterable[Received]) -> dict[SqsQueue, list[Received]]:
    queues: dict[SqsQueue, list[Received]] = {}
    for item in received:
        queues.setdefault(item.queue, []).append(item)
    return queues


def queue_names(
    pattern: str | None, settings: SqsSettings, consumer: str, topics: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the names of the consumer's queues, and the prefixes of others.

    Args:
        pattern: a name with `{topic}`, `{consumer}` or both; None: the default.

    Raises:
        ConfigError: SQS doesn't allow such names.
    """
    if pattern is None:
        pattern = _TOPIC if settings.service == "sqs" else f"{_CONSUMER}-{_TOPIC}"
    names: dict[str, None] = {}
    prefixes: dict[str, None] = {}
    start = (settings.options.queue_prefix or "") + pattern.replace(_CONSUMER, consumer)
    for topic in topics:
        fifo = settings.options.fifo
        begins = topic.endswith("*") and _TOPIC in start
        if begins and not start.endswith(_TOPIC):
            raise ConfigError(
                f"topic {topic}: {_TOPIC} has to end the option queue={pattern}"
            )
        text = start.replace(_TOPIC, topic.removesuffix("*"))
        try:
            name = resource_name(text, fifo=fifo and not begins)
        except ValueError as problem:
            raise ConfigError(f"topic {topic}: {problem}") from None
        (prefixes if begins else names)[name] = None
    return list(names), list(prefixes)
