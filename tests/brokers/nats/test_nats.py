"""Publishing to NATS JetStream: the behaviour that the suite doesn't cover."""

from typing import Any

import nats
import pytest

from pillarbox import Message
from pillarbox.inbox.sources.nats import NatsSource
from pillarbox.outbox.brokers.nats.connection import NatsConnection
from pillarbox.outbox.errors import BrokerUnavailableError, ConfigError
from pillarbox.relay.publisher import Acked, Nacked
from pillarbox.relay.publishers.nats import NatsPublisher, layouts
from tests.fixtures.nats import ask, have_sent_all, make_stream, put_raw, stored
from tests.servers.nats import NatsServer, nats_server


@pytest.mark.parametrize(
    "topic",
    [
        "a b",
        "a\tb",
        "a\r\nPUB x 0",
        "a\0b",
        "a.*",
        "a.>",
        "a*",
        ".a",
        "a.",
        "a..b",
        "$JS.API.STREAM.DELETE.ORDERS",
        "$SYS.x",
        "_INBOX.x",
    ],
)
async def test_an_invalid_subject_is_refused_permanently(
    shared_nats: NatsServer, nats_topics: str, topic: str
) -> None:
    good = Message(f"{nats_topics}.ä", b"")
    async with NatsPublisher(shared_nats.url) as publisher:
        refused, acked = await publisher.publish([Message(topic, b""), good])
    assert isinstance(refused, Nacked)
    assert refused.permanent
    assert "topic" in refused.reason
    assert acked == Acked()


async def test_a_topic_without_a_stream_is_refused_until_a_stream_captures_it(
    private_nats: NatsServer,
) -> None:
    batch = [Message("nobody.listens", b""), Message("orders.x", b"")]
    async with NatsPublisher(private_nats.url) as publisher:
        refused, acked = await publisher.publish(batch)
        assert isinstance(refused, Nacked)
        assert not refused.permanent
        assert "no stream captures topic 'nobody.listens': add it" in refused.reason
        assert acked == Acked()
        await make_stream(private_nats.url, "NOBODY", "nobody.>")
        assert await publisher.publish(batch) == [Acked()] * 2


async def test_the_broker_is_unavailable_until_the_stream_of_its_url_exists(
    private_nats: NatsServer,
) -> None:
    url = private_nats.url
    async with NatsPublisher(f"{url}?stream=ORDERS") as publisher:
        await ask(url, "STREAM.DELETE.ORDERS")
        with pytest.raises(BrokerUnavailableError, match=r"stream 'ORDERS'.*create"):
            await publisher.publish([Message("orders.x", b"")])
        await make_stream(url, "ORDERS", "orders.>")
        assert await publisher.publish([Message("orders.x", b"")]) == [Acked()]


async def test_a_missing_stream_of_the_url_is_recreated_if_allowed(
    private_nats: NatsServer,
) -> None:
    url = f"{private_nats.url}?stream=ORDERS&create=orders.>"
    message = Message("orders.x", b"")
    async with NatsPublisher(url) as publisher:
        await ask(private_nats.url, "STREAM.DELETE.ORDERS")
        with pytest.raises(
            BrokerUnavailableError, match="had been deleted and was recreated"
        ):
            await publisher.publish([message])
        (refused, acked) = await publisher.publish([Message("other.x", b""), message])
    assert isinstance(refused, Nacked)
    assert not refused.permanent
    assert acked == Acked()
    assert await stored(private_nats.url, "ORDERS") == [message]


async def test_headers_with_a_meaning_for_nats_are_refused(
    shared_nats: NatsServer, nats_topics: str
) -> None:
    topic = f"{nats_topics}.x"
    messages = [
        Message(topic, b"", headers={name: "all"})
        for name in ("Nats-Rollup", "nats-msg-id", "Status")
    ]
    async with NatsPublisher(shared_nats.url) as publisher:
        first, second, third = await publisher.publish(messages)
    assert isinstance(first, Nacked)
    assert isinstance(second, Nacked)
    assert first.permanent
    assert third == Acked()
    (message,) = await stored(shared_nats.url, nats_topics)
    assert message.headers == {"Status": "all"}


async def test_the_servers_limit_counts_headers_and_is_exact_to_the_byte(
    shared_nats: NatsServer, nats_topics: str
) -> None:
    topic, limit = f"{nats_topics}.x", 1024 * 1024
    async with NatsPublisher(shared_nats.url) as publisher:
        # All with one id: ce-time is shorter for a whole second.
        message = Message(topic, bytes(limit))
        (refused,) = await publisher.publish([message])
        assert isinstance(refused, Nacked)
        assert refused.permanent
        over = int(refused.reason.split(" ")[2]) - limit
        exact = message.replace(payload=bytes(limit - over))
        large = message.replace(payload=bytes(limit - over + 1))
        assert await publisher.publish([exact]) == [Acked()]
        (refused,) = await publisher.publish([large])
        assert isinstance(refused, Nacked)
        assert f"{limit + 1} bytes" in refused.reason
        assert f"{limit} (max_payload)" in refused.reason
        assert await publisher.publish([exact]) == [Acked()]


async def test_a_message_too_large_for_its_stream_is_refused_permanently(
    shared_nats: NatsServer,
) -> None:
    await make_stream(shared_nats.url, "SMALL", "small.>", max_msg_size=1000)
    async with NatsPublisher(shared_nats.url) as publisher:
        refused, acked = await publisher.publish(
            [Message("small.x", bytes(1000)), Message("small.x", b"")]
        )
    assert isinstance(refused, Nacked)
    assert refused.permanent
    assert "max_msg_size" in refused.reason
    assert acked == Acked()


async def test_a_full_stream_is_unavailable_unless_other_streams_accept_messages(
    shared_nats: NatsServer, nats_topics: str
) -> None:
    await make_stream(
        shared_nats.url, "FULL", "full.>", max_msgs=1, discard="new", max_age=0
    )
    await put_raw(shared_nats.url, "full.x", b"")
    full, other = Message("full.x", b""), Message(f"{nats_topics}.x", b"")
    async with NatsPublisher(shared_nats.url) as publisher:
        with pytest.raises(
            BrokerUnavailableError, match="'FULL' is not accepting messages"
        ):
            await publisher.publish([full])
        assert await publisher.publish([other]) == [Acked()]
        (refused,) = await publisher.publish([full])
        assert isinstance(refused, Nacked)
        assert not refused.permanent


@pytest.mark.parametrize("limit", [{"max_msgs": 3}, {"max_bytes": 1500}])
async def test_a_stream_that_fills_up_mid_batch_costs_no_attempt(
    private_nats: NatsServer, limit: dict[str, int]
) -> None:
    url, settings = private_nats.url, {"name": "FULL", "subjects": ["full.>"]}
    await ask(url, "STREAM.CREATE.FULL", **settings, **limit, discard="new")
    batch = [Message("full.x", bytes(100)) for _ in range(9)]
    async with NatsPublisher(url) as publisher:
        # The second time, the acked messages are already stored.
        for _ in range(2):
            with pytest.raises(BrokerUnavailableError, match="'FULL' is not accepting"):
                await publisher.publish(batch)
        await ask(url, "STREAM.UPDATE.FULL", **settings, discard="new")
        assert await publisher.publish(batch) == [Acked()] * 9
    assert await stored(url, "FULL") == batch


async def test_a_stream_that_never_acks_holds_up_no_other_topic(
    private_nats: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    url = private_nats.url
    await make_stream(url, "SILENT", "silent.>", no_ack=True)
    silent, other = Message("silent.x", b""), Message("orders.x", b"")
    async with NatsPublisher(f"{url}?timeout=2s") as publisher:
        assert "stream 'SILENT' has no_ack" in caplog.text
        for batch in ([silent, other], [other, silent], [silent]):
            answers = dict(zip(batch, await publisher.publish(batch), strict=True))
            assert answers.get(other, Acked()) == Acked()
            refused = answers[silent]
            assert isinstance(refused, Nacked)
            assert not refused.permanent
            assert "turn it off" in refused.reason


async def test_a_stream_whose_answer_is_late_is_waited_for_without_costing_an_attempt(
    private_nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NatsConnection, "streams", no_streams)
    url = private_nats.url
    await make_stream(url, "SILENT", "silent.>", no_ack=True)
    silent = Message("silent.x", b"")
    # Its answer is that of a duplicate, which doesn't show that the stream has room.
    known = Message("orders.x", b"")
    async with NatsPublisher(url) as publisher:
        await publisher.publish([known])
    async with NatsPublisher(f"{url}?timeout=2s") as publisher:
        acked, late = await publisher.publish([known, silent])
        with pytest.raises(BrokerUnavailableError, match="'SILENT' gave no answer"):
            await publisher.publish([silent])
    assert acked == Acked()
    assert isinstance(late, Nacked)
    assert late.retry_after is not None


async def no_streams(connection: NatsConnection, name: str | None = None) -> list[Any]:
    """Answer as to a user who isn't allowed to ask."""
    return []


@pytest.mark.parametrize("options", ["", "?stream=EVENTS"])
async def test_a_stream_that_drops_messages_without_a_consumer_is_reported_at_the_start(
    private_nats: NatsServer, caplog: pytest.LogCaptureFixture, options: str
) -> None:
    url = private_nats.url
    await make_stream(url, "EVENTS", "events.>", retention="interest")
    async with NatsPublisher(url + options):
        assert "stream 'EVENTS' confirms and drops messages" in caplog.text
    caplog.clear()
    async with (
        NatsSource(url, consumer="billing", topics=["events.*"]),
        NatsPublisher(url + options),
    ):
        assert caplog.text == ""


async def test_a_message_too_large_for_the_room_left_in_a_stream_is_nacked(
    private_nats: NatsServer,
) -> None:
    url = private_nats.url
    await make_stream(url, "FULL", "full.>", max_bytes=5000, discard="new")
    async with NatsPublisher(url) as publisher:
        refused, acked = await publisher.publish(
            [Message("full.x", bytes(5000)), Message("full.x", bytes(100))]
        )
    assert isinstance(refused, Nacked)
    assert not refused.permanent
    assert acked == Acked()


async def test_the_stream_of_the_url_is_created_on_demand_and_enforced(
    private_nats: NatsServer,
) -> None:
    url = f"{private_nats.url}?stream=BILLS"
    with pytest.raises(ConfigError, match=r"stream 'BILLS'.*add create="):
        async with NatsPublisher(url):
            pass
    for source, problem in (
        (url, "stream 'BILLS'"),
        (private_nats.url, "no stream captures topic 'bills.x': add it"),
    ):
        with pytest.raises(ConfigError, match=problem):
            async with NatsSource(source, consumer="billing", topics=["bills.x"]):
                pass
    async with NatsPublisher(f"{url}&create=bills.>,invoices") as publisher:
        answers = await publisher.publish(
            [Message(t, b"") for t in ("bills.x", "invoices", "orders.x")]
        )
    assert answers[:2] == [Acked()] * 2
    assert isinstance(answers[2], Nacked)
    assert not answers[2].permanent
    assert "captured by another stream" in answers[2].reason


async def test_a_server_without_jetstream_is_reported_at_start() -> None:
    with nats_server({"jetstream": None}) as server:
        with pytest.raises(BrokerUnavailableError, match="JetStream isn't available"):
            async with NatsPublisher(server.url):
                pass
        with pytest.raises(BrokerUnavailableError, match="JetStream isn't available"):
            async with NatsSource(server.url, consumer="billing", topics=["x"]):
                pass


@pytest.mark.parametrize(
    "query",
    ["stream=a.b", "stream=a%20b", "create=x", "nonsense=1", "max_payload_bytes=0"],
)
def test_an_invalid_publisher_url_is_refused(query: str) -> None:
    with pytest.raises(ConfigError):
        NatsPublisher(f"nats://h:4222?{query}")


@pytest.mark.parametrize(
    "url",
    [
        "nats://",
        "nats://:4222",
        "nats://h:x",
        "http://h",
        "nats://h/path",
        "nats://a,,b",
        "nats://h?tls_ca=/x",
        "tls://h?tls_ca=/no/such/file",
        "nats://h?ack_wait=0s",
    ],
)
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="broker URL"):
        NatsSource(url, consumer="billing", topics=["x"])


async def test_other_clients_see_cloudevents(
    shared_nats: NatsServer, nats_topics: str
) -> None:
    message = Message(f"{nats_topics}.x", {"n": 1}, key="ä", headers={"own": "a b"})
    async with await nats.connect(shared_nats.url, allow_reconnect=False) as client:
        reader = await client.subscribe(message.topic)
        await have_sent_all(client)
        async with NatsPublisher(shared_nats.url) as publisher:
            await publisher.publish([message])
        got = await reader.next_msg(timeout=60)
    headers = got.headers or {}
    assert headers["Nats-Msg-Id"] == headers["ce-id"] == str(message.id)
    assert headers["ce-specversion"] == "1.0"
    assert headers["ce-type"] == message.topic
    assert headers["ce-partitionkey"] == "%C3%A4"
    assert headers["own"] == "a b"
    assert headers["content-type"] == "application/json"
    assert await stored(shared_nats.url, nats_topics) == [message]


async def test_a_topic_whose_stream_was_replaced_is_published_after_a_silence(
    private_nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "_SILENCE", 0.0)
    url = private_nats.url
    await make_stream(url, "OTHERS", "others.>")
    lost, other = Message("orders.x", b""), Message("others.x", b"")
    async with NatsPublisher(url) as publisher:
        assert await publisher.publish([lost, other]) == [Acked()] * 2
        await ask(url, "STREAM.DELETE.ORDERS")
        refused, acked = await publisher.publish([lost, other])
        assert isinstance(refused, Nacked)
        assert "no stream captures topic 'orders.x'" in refused.reason
        assert acked == Acked()
        await make_stream(url, "NEW", "orders.>")
        assert await publisher.publish([lost, other]) == [Acked()] * 2
