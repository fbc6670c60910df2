"""The RabbitMQ publisher beyond the suite: routing, refusals, permissions, format."""

from collections.abc import Iterator
from uuid import uuid4

import pytest

from pillarbox import Message
from pillarbox.outbox.errors import (
    BrokerTimeoutError,
    BrokerUnavailableError,
    ConfigError,
)
from pillarbox.relay.publisher import Acked, Nacked
from pillarbox.relay.publishers.rabbitmq import RabbitMQPublisher
from tests.fixtures.consumers import numbered
from tests.fixtures.proxy import MakeProxy
from tests.fixtures.rabbitmq import (
    bind,
    channel_of,
    drain,
    exchange_of,
    restrict_topics,
    user,
)
from tests.servers.rabbitmq import RabbitMQServer


@pytest.fixture
def writer(shared_rabbitmq: RabbitMQServer) -> Iterator[str]:
    """A user that may write, but not declare anything."""
    name = f"writer-{uuid4().hex}"
    with user(shared_rabbitmq, name, "secret", "^$"):
        yield name


async def test_the_wire_format_is_as_documented(rabbitmq_url: str) -> None:
    message = Message(
        "orders.placed",
        {"n": 1},
        key="k",
        tenant="acme",
        headers={"traceparent": "00-1"},
        schema_version=2,
    )
    bind(rabbitmq_url, message.topic)
    async with RabbitMQPublisher(rabbitmq_url) as publisher:
        assert await publisher.publish([message]) == [Acked()]
    with channel_of(rabbitmq_url) as channel:
        method, properties, body = channel.basic_get(message.topic, auto_ack=True)
    assert method is not None
    assert properties is not None
    assert (method.exchange, method.routing_key) == (
        exchange_of(rabbitmq_url),
        "orders.placed",
    )
    assert body == b'{"n":1}'
    assert properties.message_id == str(message.id)
    assert properties.content_type == "application/json"
    assert properties.delivery_mode == 2
    assert properties.headers is not None
    time = properties.headers.pop("cloudEvents:time")
    assert time.endswith("+00:00")
    published_in_ms = properties.headers.pop("timestamp_in_ms")
    assert published_in_ms >= message.id.int >> 80
    assert properties.timestamp == published_in_ms // 1000
    assert properties.headers == {
        "cloudEvents:specversion": "1.0",
        "cloudEvents:id": str(message.id),
        "cloudEvents:source": "urn:pillarbox",
        "cloudEvents:type": "orders.placed",
        "cloudEvents:partitionkey": "k",
        "cloudEvents:tenant": "acme",
        "cloudEvents:schemaversion": "2",
        "traceparent": "00-1",
    }


async def test_unroutable_messages_are_nacked_and_not_lost(rabbitmq_url: str) -> None:
    bind(rabbitmq_url, "orders")
    lost, found = Message("nowhere", b"1"), Message("orders", b"2")
    async with RabbitMQPublisher(rabbitmq_url) as publisher:
        answers = await publisher.publish([lost, found])
        assert answers[1] == Acked()
        assert isinstance(answers[0], Nacked)
        assert not answers[0].permanent
        assert "no queue is bound" in answers[0].reason
        bind(rabbitmq_url, "nowhere")
        assert await publisher.publish([lost]) == [Acked()]
    assert [m.id for m in drain(rabbitmq_url, "nowhere", 1)] == [lost.id]


async def test_unroutable_messages_are_dropped_on_request(rabbitmq_url: str) -> None:
    async with RabbitMQPublisher(f"{rabbitmq_url}&unroutable=drop") as each:
        assert await each.publish([Message("nowhere", b"1")]) == [Acked()]


async def test_messages_that_amqp_cannot_carry_are_refused_permanently(
    rabbitmq_url: str,
) -> None:
    bind(rabbitmq_url, "orders")
    bad = [
        Message("ä" * 128, b""),
        Message("orders", b"", content_type="x" * 256),
        Message("orders", b"", headers={"n" * 256: ""}),
        Message("orders", b"", headers={"x": "ä" * 65_000}),
        Message("orders", b"", headers={"x": "\ud800"}),
        Message("orders", b"", headers={"CC": "others"}),
        Message("orders", b"", headers={"BCC": "others"}),
    ]
    good = Message("orders", b"1", headers={"n" * 255: "ä" * 50_000})
    async with RabbitMQPublisher(rabbitmq_url) as publisher:
        answers = await publisher.publish([*bad, good])
    assert all(isinstance(a, Nacked) and a.permanent for a in answers[:-1]), answers
    assert answers[-1] == Acked()


async def test_a_topic_without_write_permission_is_refused_alone(
    shared_rabbitmq: RabbitMQServer, rabbitmq_url: str, writer: str
) -> None:
    exchange = exchange_of(rabbitmq_url)
    bind(rabbitmq_url, "orders")
    bind(rabbitmq_url, "secret")
    restrict_topics(shared_rabbitmq, writer, exchange, "^orders$")
    url = rabbitmq_url.replace("guest:guest", f"{writer}:secret")
    messages = [
        Message("orders", b"1"),
        Message("secret", b"2"),
        Message("orders", b""),
    ]
    async with RabbitMQPublisher(url) as publisher:
        for _ in range(2):
            first, refused, last = await publisher.publish(messages)
            assert (first, last) == (Acked(), Acked())
            assert isinstance(refused, Nacked)
            assert not refused.permanent
            assert "access to topic 'secret'" in refused.reason


async def test_an_exchange_that_cannot_be_declared_is_reported_at_start(
    rabbitmq_url: str, writer: str
) -> None:
    url = rabbitmq_url.replace("guest:guest", f"{writer}:secret")
    with pytest.raises(ConfigError, match=r"exchange 'test-.*' doesn't exist"):
        async with RabbitMQPublisher(url):
            pass


async def test_messages_confirmed_before_a_timeout_are_not_published_again(
    rabbitmq_url: str, proxy: MakeProxy
) -> None:
    topic = f"orders.{uuid4().hex}"
    bind(rabbitmq_url, topic)
    slow, through = proxy(f"{rabbitmq_url}&timeout=3s")
    first, large = Message(topic, b"1"), Message(topic, bytes(16 * 1024 * 1024))
    async with RabbitMQPublisher(through) as publisher:
        assert await publisher.publish([Message(topic, b"0")]) == [Acked()]
        slow.slow(0.05)
        with pytest.raises(BrokerTimeoutError, match="not all confirms within 3 s"):
            await publisher.publish([first, large])
        slow.slow(0)
        assert await publisher.publish([first, large]) == [Acked(), Acked()]
    arrived = drain(rabbitmq_url, topic, 3)
    assert [len(message.payload) for message in arrived] == [1, 1, len(large.payload)]


async def test_a_deleted_exchange_is_declared_again(rabbitmq_url: str) -> None:
    bind(rabbitmq_url, "orders")
    messages = numbered(3)
    async with RabbitMQPublisher(rabbitmq_url) as publisher:
        assert await publisher.publish(messages) == [Acked()] * 3
        with channel_of(rabbitmq_url) as channel:
            channel.exchange_delete(exchange_of(rabbitmq_url))
        answers = await publisher.publish(messages)
        assert all(isinstance(answer, Nacked) for answer in answers)
        bind(rabbitmq_url, "orders")
        assert await publisher.publish(messages) == [Acked()] * 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("guest:guest", "guest:5ecret"), "rejected the connection: .*ACCESS_REFUSED"),
        (("?", "/nowhere?"), "rejected the connection: .*vhost nowhere not found"),
        (("amqp:", "amqps:"), "can't be reached"),
    ],
)
async def test_an_invalid_url_is_reported_at_start(
    rabbitmq_url: str, change: tuple[str, str], reason: str
) -> None:
    with pytest.raises(BrokerUnavailableError, match=reason) as told:
        async with RabbitMQPublisher(rabbitmq_url.replace(*change)):
            pass
    assert "5ecret" not in str(told.value)
