"""The destination of a message in AWS: an SQS queue or an SNS topic."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from botocore.exceptions import ClientError

from pillarbox.outbox.brokers.sqs.connection import DENIED, SqsSettings, code_of

_MIB: Final = 1024 * 1024
# For a topic whose MaximumMessageSize was never set or can't be read.
_SNS_BYTES: Final = 256 * 1024


@dataclass(frozen=True, slots=True)
class Destination:
    """An SQS queue or an SNS topic.

    Attributes:
        name: the name of the queue or topic.
        address: how the API identifies it: a queue's URL or a topic's ARN.
        max_bytes: the maximum size of one message.
        max_request_bytes: the maximum total size of the messages in one request.
    """

    name: str
    address: str
    max_bytes: int
    max_request_bytes: int


class Queues:
    """SQS queues; calls raise the errors in `BROKEN`."""

    kind = "queue"
    body = "MessageBody"

    def __init__(self, settings: SqsSettings) -> None:
        self._account = settings.options.account
        self._prefix = settings.prefix

    async def connect(self, client: Any) -> None:
        """List one queue as a test; lacking the privilege to do so is not an error."""
        with _unless_denied():
            await client.list_queues(QueueNamePrefix=self._prefix or "-", MaxResults=1)

    async def find(self, client: Any, name: str) -> Destination:
        """Look up a queue and its maximum message size."""
        owner = {"QueueOwnerAWSAccountId": self._account} if self._account else {}
        url = (await client.get_queue_url(QueueName=name, **owner))["QueueUrl"]
        limit = await _limit(
            client.get_queue_attributes(
                QueueUrl=url, AttributeNames=["MaximumMessageSize"]
            ),
            _MIB,
        )
        return Destination(name, url, limit, _MIB)

    async def send(
        self, client: Any, destination: Destination, entries: Sequence[dict[str, Any]]
    ) -> Mapping[str, Any]:
        """Send up to ten entries; return AWS's answer, including `Failed`."""
        answer: Mapping[str, Any] = await client.send_message_batch(
            QueueUrl=destination.address, Entries=entries
        )
        return answer


class Topics:
    """SNS topics; calls raise the errors in `BROKEN`."""

    kind = "topic"
    body = "Message"

    def __init__(self, settings: SqsSettings) -> None:
        self._settings = settings
        self._arn = ""

    async def connect(self, client: Any) -> None:
        """Look up the account, which is part of the ARNs of topics."""
        region = client.meta.region_name
        partition = client.meta.partition
        account = self._settings.options.account
        if account is None:
            async with self._settings.client(
                "sts", connections=1, read_timeout=10
            ) as tokens:
                account = (await tokens.get_caller_identity())["Account"]
        self._arn = f"arn:{partition}:sns:{region}:{account}:"
        with _unless_denied():
            await client.list_topics()

    async def find(self, client: Any, name: str) -> Destination:
        """Look up a topic and its maximum message size."""
        arn = self._arn + name
        limit = await _limit(client.get_topic_attributes(TopicArn=arn), _SNS_BYTES)
        return Destination(name, arn, limit, limit)

    async def send(
        self, client: Any, destination: Destination, entries: Sequence[dict[str, Any]]
    ) -> Mapping[str, Any]:
        """Send up to ten entries; return AWS's answer, including `Failed`."""
        answer: Mapping[str, Any] = await client.publish_batch(
            TopicArn=destination.address, PublishBatchRequestEntries=entries
        )
        return answer


Service: TypeAlias = Queues | Topics


async def _limit(call: Any, otherwise: int) -> int:
    answer: Mapping[str, Any] = {}
    with _unless_denied():
        answer = await call
    return int(answer.get("Attributes", {}).get("MaximumMessageSize", otherwise))


@contextmanager
def _unless_denied() -> Iterator[None]:
    """End the block if the privilege for its call is missing."""
    try:
        yield
    except ClientError as error:
        if code_of(error) not in DENIED:
            raise
