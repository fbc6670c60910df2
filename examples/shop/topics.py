"""Create what the shop needs in AWS: `python -m examples.shop.topics`.

Most brokers create a topic when it is used. For SNS, this creates the topic, and a
queue for each consumer, as soon as a local substitute of AWS accepts connections.
"""

import asyncio
import time
from typing import Any

from pillarbox.inbox.demo.orders import CONSUMERS, TOPIC
from pillarbox.outbox.cli.command import BROKER_VARIABLE, url_of


async def make_topic(url: str) -> None:
    """Create the SNS topic, and for each consumer a queue that is subscribed to it."""
    from pillarbox.outbox.brokers.sqs.connection import SqsSettings

    settings = SqsSettings.from_url(url)
    name = TOPIC.replace(".", "-")

    async def call(service: str, action: str, **arguments: Any) -> Any:
        async with settings.client(service, connections=1, read_timeout=30) as client:
            return await getattr(client, action)(**arguments)

    made = await call(
        "sns", "create_topic", Name=f"{name}.fifo", Attributes={"FifoTopic": "true"}
    )
    for consumer in CONSUMERS:
        queue = f"{consumer}-{name}.fifo"
        await call(
            "sqs", "create_queue", QueueName=queue, Attributes={"FifoQueue": "true"}
        )
        await call(
            "sns",
            "subscribe",
            TopicArn=made["TopicArn"],
            Protocol="sqs",
            Endpoint=f"arn:aws:sqs:eu-west-1:123456789012:{queue}",
            Attributes={"RawMessageDelivery": "true"},
        )


if __name__ == "__main__":
    broker = url_of(None, "broker", BROKER_VARIABLE)
    if broker.startswith("sns:"):
        from botocore.exceptions import EndpointConnectionError, HTTPClientError

        while True:
            try:
                asyncio.run(make_topic(broker))
                break
            except (EndpointConnectionError, HTTPClientError):
                time.sleep(0.5)
