"""A topic in shards on NATS: replicas divide them, and a new layout waits."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

from pillarbox import Message
from pillarbox.inbox.source import Source
from pillarbox.inbox.sources.nats.replicas import Replica, divide
from pillarbox.outbox.brokers.shards import Shard
from pillarbox.outbox.errors import BrokerUnavailableError
from pillarbox.outbox.gather import end
from pillarbox.outbox.testing.samples import numbered, numbers_by_key
from pillarbox.relay.publisher import Acked, Nacked
from pillarbox.relay.publishers.nats import NatsPublisher
from pillarbox.relay.publishers.nats.layouts import line_of
from tests.brokers.nats.test_nats_source import durables, shared_source, source
from tests.fixtures.nats import ask, make_stream, put_raw, stored
from tests.fixtures.proxy import MakeProxy
from tests.fixtures.sources import payloads, publish, receive
from tests.fixtures.urls import with_options
from tests.servers.nats import NatsServer

HOLD = timedelta(seconds=1)


class Worker:
    """Receives and acks with one source in the background.

    Attributes:
        messages: those received since they were last cleared.
    """

    def __init__(self, replica: Source, news: asyncio.Event) -> None:
        self.replica = replica
        self.messages: list[Message] = []
        self._news = news
        self.task = asyncio.create_task(self._work())

    @property
    def shards(self) -> set[int]:
        """Which shards of eight the messages came from."""
        return {Shard.holding(each, 8).number for each in self.messages}

    async def _work(self) -> None:
        while True:
            with suppress(BrokerUnavailableError):
                for delivery in await self.replica.receive(limit=20):
                    self.messages.append(delivery.message)
                    await delivery.ack()
            self._news.set()


class Workers:
    """Several replicas of a consumer, and a topic in eight shards."""

    def __init__(self, url: str, topic: str) -> None:
        self.all: list[Worker] = []
        self.topic = topic
        self._url = with_options(url, shards=8)
        self._stack = AsyncExitStack()
        self._news = asyncio.Event()
        self._number = 0

    async def start(self, url: str, **options: object) -> Worker:
        replica = source(url, self.topic, **options)
        worker = Worker(await self._stack.enter_async_context(replica), self._news)
        self.all.append(worker)
        return worker

    async def close(self) -> None:
        await end(worker.task for worker in self.all)
        await self._stack.aclose()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Publish to all shards until a condition on what is received holds."""
        async with asyncio.timeout(60), NatsPublisher(self._url) as publisher:
            while not condition():
                for worker in self.all:
                    worker.messages.clear()
                await self.publish(publisher)

    async def publish(self, publisher: NatsPublisher) -> None:
        """Publish, and wait until everything has arrived."""
        messages = numbered(self.topic, 80, keys=40, start=self._number)
        self._number += 80
        assert await publisher.publish(messages) == [Acked()] * 80
        ids = {message.id for message in messages}
        while ids - {it.id for worker in self.all for it in worker.messages}:
            self._news.clear()
            await self._news.wait()

    def divided(self, *sizes: int) -> Callable[[], bool]:
        """Return whether replicas read so many shards each, and no shard twice."""

        def are_divided() -> bool:
            shards = [worker.shards for worker in self.all]
            return sorted(map(len, shards)) == list(sizes)

        return are_divided


@asynccontextmanager
async def workers(url: str, topic: str) -> AsyncIterator[Workers]:
    running = Workers(url, topic)
    try:
        yield running
    finally:
        await running.close()


async def test_replicas_find_shards_and_divide_them_as_replicas_come_and_go(
    shared_nats: NatsServer, nats_topics: str
) -> None:
    url = shared_nats.url
    async with workers(url, f"{nats_topics}.x") as running:
        for sizes in ((8,), (4, 4), (2, 3, 3)):
            await running.start(url)
            await running.until(running.divided(*sizes))
        assert not any(it.replica.abilities.standing_by() for it in running.all)
        left = running.all.pop()
        await end([left.task])
        await left.replica.__aexit__(None, None, None)
        await running.until(running.divided(4, 4))


async def test_the_shards_of_a_replica_that_is_gone_are_read_long_before_ack_wait(
    shared_nats: NatsServer, nats_topics: str, proxy: MakeProxy
) -> None:
    url, loop = shared_nats.url, asyncio.get_running_loop()
    between, cut_off = proxy(url)
    async with workers(url, f"{nats_topics}.x") as running:
        for each in (url, url, cut_off):
            await running.start(each)
        await running.until(running.divided(2, 3, 3))
        async with NatsPublisher(with_options(url, shards=8)) as publisher:
            await running.publish(publisher)
            between.refuse()
            gone_at = loop.time()
            await running.publish(publisher)
            assert loop.time() - gone_at < 15  # ack_wait is 30 s.


async def test_the_shards_of_a_frozen_replica_are_read_after_ack_wait(
    shared_nats: NatsServer, nats_topics: str, proxy: MakeProxy
) -> None:
    url = shared_nats.url
    between, frozen = proxy(url)
    async with workers(url, f"{nats_topics}.x") as running:
        for each in (url, url, frozen):
            await running.start(each, ack_wait=2 * HOLD)
        await running.until(running.divided(2, 3, 3))
        async with NatsPublisher(with_options(url, shards=8)) as publisher:
            await running.publish(publisher)
            between.stall()
            await running.publish(publisher)
            between.resume()
        await running.until(running.divided(2, 3, 3))


async def test_replicas_that_share_freely_read_all_shards(
    shared_nats: NatsServer, nats_topics: str
) -> None:
    topic, url = f"{nats_topics}.x", shared_nats.url
    async with shared_source(url, topic) as one, shared_source(url, topic) as other:
        await publish(with_options(url, shards=3), *numbered(topic, 30, keys=10))
        numbers: list[int] = []
        while len(numbers) < 30:
            for replica in (one, other):
                for delivery in await replica.receive(limit=5):
                    numbers += payloads([delivery])
                    await delivery.ack()
    assert sorted(numbers) == list(range(30))
    assert len(await durables(url, nats_topics)) == 4


async def test_a_handler_of_a_prefix_gets_shards_in_order_through_one_durable(
    shared_nats: NatsServer, nats_topics: str
) -> None:
    topic, url = f"{nats_topics}.x", shared_nats.url
    async with source(url, f"{nats_topics}.*") as consumer:
        for shards in (1, 3, 1):
            await publish(with_options(url, shards=shards), *numbered(topic, 10))
        arrived = await receive(consumer, 30)
    assert payloads(arrived) == [*range(10)] * 3
    assert {each.message.topic for each in arrived} == {topic}
    assert len(await durables(url, nats_topics)) == 1


@pytest.mark.parametrize("kind", [source, shared_source])
async def test_a_handler_of_a_prefix_gets_no_shards_of_a_topic_named_like_it(
    shared_nats: NatsServer, nats_topics: str, kind: Any
) -> None:
    topic, url = f"{nats_topics}.x", shared_nats.url
    async with kind(url, f"{topic}.*") as consumer:
        await publish(with_options(url, shards=2), *numbered(topic, 9, keys=9))
        await publish(with_options(url, shards=2), *numbered(f"{topic}.y", 1))
        (delivery,) = await receive(consumer, 1)
        assert delivery.message.topic == f"{topic}.y"
        await delivery.ack()
    (name,) = await durables(url, nats_topics)
    left = await ask(url, f"CONSUMER.INFO.{nats_topics}.{name}")
    assert (left["num_pending"], left["num_ack_pending"]) == (0, 0)


async def test_messages_of_a_key_are_published_in_one_shard_in_order(
    shared_nats: NatsServer, nats_topics: str
) -> None:
    messages = numbered(f"{nats_topics}.x", 60, keys=20)
    await publish(with_options(shared_nats.url, shards=4), *messages)
    found: list[Message] = []
    for number in range(1, 5):
        shard = f"{nats_topics}.x.shard-{number}-of-4"
        of_shard = await stored(shared_nats.url, nats_topics, shard)
        assert of_shard
        assert {Shard.holding(each, 4).name for each in of_shard} == {shard}
        found += of_shard
    assert numbers_by_key(found) == numbers_by_key(messages)


async def test_another_layout_waits_until_the_durables_have_settled_the_last_one(
    shared_nats: NatsServer, nats_topics: str
) -> None:
    topic, url = f"{nats_topics}.x", shared_nats.url
    async with source(url, topic) as consumer:
        for before, after in pairwise((1, 8, 3, 1)):
            last, new = numbered(topic, 2)
            await publish(with_options(url, shards=before), last)
            (delivery,) = await receive(consumer, 1)
            async with NatsPublisher(with_options(url, shards=after)) as publisher:
                (postponed,) = await publisher.publish([new])
                assert isinstance(postponed, Nacked)
                assert postponed.retry_after is not None
                assert "billing_" in postponed.reason
                # What others go on to publish in the last layout isn't waited for.
                later = Message(topic, b"2", key=last.key)
                await publish(with_options(url, shards=before), later)
                await delivery.ack()
                while await publisher.publish([new]) != [Acked()]:
                    pass
                assert sorted(payloads(await settle(consumer, 2))) == [1, 2]


async def settle(consumer: Source, count: int) -> Sequence[Any]:
    deliveries = await receive(consumer, count)
    for delivery in deliveries:
        await delivery.ack()
    return deliveries


async def test_a_lane_that_another_layout_may_have_had_meanwhile_waits_too(
    shared_nats: NatsServer, nats_topics: str
) -> None:
    topic, url = f"{nats_topics}.x", shared_nats.url
    ours, theirs = (Message(topic, b"1", key=f"key-{i}") for i in range(2))
    assert line_of(ours) != line_of(theirs)
    async with (
        source(url, topic) as consumer,
        NatsPublisher(with_options(url, shards=8)) as publisher,
    ):
        assert await publisher.publish([ours]) == [Acked()]
        # A relay with the last layout still has the other lane.
        await put_raw(url, topic, b"1")
        goes_on, waits = await publisher.publish([ours, theirs])
        assert goes_on == Acked()
        assert isinstance(waits, Nacked)
        await settle(consumer, 2)
        while await publisher.publish([theirs]) != [Acked()]:
            pass


async def test_another_layout_waits_for_consumers_that_have_not_found_the_last_one(
    shared_nats: NatsServer, nats_topics: str
) -> None:
    topic, url = f"{nats_topics}.x", shared_nats.url
    async with source(url, topic):
        pass
    await publish(with_options(url, shards=8), Message(topic, b"1"))
    async with NatsPublisher(url) as publisher:
        (waits,) = await publisher.publish([Message(topic, b"2")])
        assert isinstance(waits, Nacked)
        assert "pillarbox consumer billing" in waits.reason
        async with source(url, topic) as consumer:
            assert payloads(await settle(consumer, 1)) == [1]
            while await publisher.publish([Message(topic, b"2")]) != [Acked()]:
                pass


@pytest.mark.parametrize(
    ("config", "waits"),
    [
        ({"filter_subject": "T"}, True),
        ({"filter_subject": "T", "ack_policy": "none"}, True),
        ({"filter_subject": "T.shard-1-of-2"}, True),
        ({"filter_subject": "T.*"}, False),
        ({"filter_subject": "T.>"}, False),
        ({"filter_subject": "T.shard-1-of-3"}, False),
        ({"filter_subject": "T.y"}, False),
        ({}, False),
    ],
)
async def test_a_layout_waits_for_durables_of_others_that_do_not_get_both(
    shared_nats: NatsServer, nats_topics: str, config: dict[str, str], waits: bool
) -> None:
    topic, url = f"{nats_topics}.x", shared_nats.url
    named = {name: value.replace("T", topic) for name, value in config.items()}
    await ask(
        url,
        f"CONSUMER.DURABLE.CREATE.{nats_topics}.audit",
        stream_name=nats_topics,
        config={"durable_name": "audit", "ack_policy": "explicit", **named},
    )
    for subject in (topic, f"{topic}.shard-1-of-2", f"{topic}.shard-1-of-3"):
        await put_raw(url, subject, b"")
    async with NatsPublisher(with_options(url, shards=3)) as publisher:
        (answer,) = await publisher.publish([Message(topic, b"")])
    assert isinstance(answer, Nacked) is waits
    assert not waits or "audit" in str(answer)


async def test_in_a_work_queue_another_layout_waits_for_what_nobody_has_read(
    shared_nats: NatsServer,
) -> None:
    url, topic = shared_nats.url, "jobs.x"
    await make_stream(url, "jobs", "jobs.>", retention="workqueue")
    await publish(with_options(url, shards=2), Message(topic, b"1"))
    async with NatsPublisher(with_options(url, shards=3)) as publisher:
        (postponed,) = await publisher.publish([Message(topic, b"2")])
        assert isinstance(postponed, Nacked)
        assert "-of-2" in postponed.reason
        async with source(url, topic) as consumer:
            assert payloads(await settle(consumer, 1)) == [1]
            while await publisher.publish([Message(topic, b"2")]) != [Acked()]:
                pass
            assert payloads(await settle(consumer, 1)) == [2]


@pytest.mark.parametrize(
    ("subjects", "retention", "remedy"),
    [
        (["goods.x"], "limits", "add 'goods.x.*' to its subjects"),
        (["goods.>"], "interest", "set its retention to limits"),
    ],
)
async def test_a_stream_that_would_lose_shards_is_refused_with_the_remedy(
    private_nats: NatsServer, subjects: list[str], retention: str, remedy: str
) -> None:
    await make_stream(private_nats.url, "GOODS", *subjects, retention=retention)
    url = with_options(private_nats.url, shards=2)
    async with NatsPublisher(url) as publisher:
        (refused,) = await publisher.publish([Message("goods.x", b"")])
    assert isinstance(refused, Nacked)
    assert remedy in refused.reason


async def test_what_waits_holds_back_its_key_in_other_topics_too(
    shared_nats: NatsServer, nats_topics: str
) -> None:
    one, other = f"{nats_topics}.x", f"{nats_topics}.y"
    async with source(shared_nats.url, one) as consumer:
        await publish(shared_nats.url, Message(one, b"", key="k"))
        await receive(consumer, 1)
        url = with_options(shared_nats.url, shards=2)
        async with NatsPublisher(url) as publisher:
            first, second, third = await publisher.publish(
                [Message(topic, b"", key=k) for topic, k in ((one, "k"), (other, "k"))]
                + [Message(other, b"", key="l")]
            )
    assert isinstance(first, Nacked)
    assert isinstance(second, Nacked)
    assert third == Acked()


async def test_a_topic_with_the_name_of_a_shard_is_refused_permanently(
    shared_nats: NatsServer, nats_topics: str
) -> None:
    async with NatsPublisher(shared_nats.url) as publisher:
        message = Message(f"{nats_topics}.shard-1-of-2", b"")
        (refused,) = await publisher.publish([message])
    assert isinstance(refused, Nacked)
    assert refused.permanent


def replica(
    layouts: Sequence[str], reads: Sequence[str] = (), aside: Sequence[str] = ()
) -> Replica:
    return Replica(layouts=layouts, reads=reads, aside=aside)


@dataclass(frozen=True, slots=True, kw_only=True)
class Later(Replica):
    """What a later version tells."""

    since: float = 1.0


async def test_a_replica_of_a_later_version_shares_with_one_of_this_version(
    shared_nats: NatsServer, nats_topics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics, url = [f"{nats_topics}.{name}" for name in "xy"], shared_nats.url
    async with source(url, *topics) as later:
        replicas = later._replicas
        told = replicas._itself
        monkeypatch.setattr(
            replicas, "_itself", lambda pulls: Later(**asdict(told(pulls)))
        )
        async with source(url, *topics) as earlier:
            ours: set[str] = set()
            theirs: set[str] = set()
            while len(ours) != 1 or ours | theirs != {*topics}:
                await asyncio.gather(later.receive(limit=1), earlier.receive(limit=1))
                ours, theirs = replicas.elsewhere, earlier._replicas.elsewhere
            generations = await durables(url, nats_topics)
            until = time.monotonic() + 3  # six times as long as they need to tell
            while time.monotonic() < until:
                await asyncio.gather(later.receive(limit=1), earlier.receive(limit=1))
            assert await durables(url, nats_topics) == generations


def test_a_layout_moves_no_more_than_it_must_to_be_even() -> None:
    layouts = {"x": [f"x{i}" for i in range(8)]}
    readers: dict[str, str | None] = {}
    random.seed()
    for present in ("a", "ab", "abc", "bc", "abcd", "d", "abcdefghij"):
        replicas = {
            id: replica(["x"], [it for it in readers if readers[it] == id])
            for id in present
        }
        after = dict(divide(layouts, replicas))
        sizes = [list(after.values()).count(id) for id in present]
        assert max(sizes) - min(sizes) <= 1
        moved = sum(readers.get(it) in {*present} - {after[it]} for it in after)
        new = [
            size
            for id, size in zip(present, sizes, strict=True)
            if not replicas[id].reads
        ]
        assert moved <= sum(new)
        readers = after


def test_all_durables_are_even_as_far_as_each_layout_is() -> None:
    layouts = {name: [name] for name in "uvwxyz"}
    everything = replica([*"uvwxyz"], [*"uvwxyz"])
    readers = divide(layouts, {"a": everything, "b": replica([*"uvwxyz"])})
    assert sorted(readers.values(), key=str) == ["a"] * 3 + ["b"] * 3


@pytest.mark.parametrize(
    ("other", "reader"),
    [
        (replica(["x"]), "b"),
        (replica(["x"], aside=["x"]), "a"),
        (replica([]), "a"),
    ],
)
def test_one_that_steps_aside_reads_only_if_no_other_one_can(
    other: Replica, reader: str
) -> None:
    aside = replica(["x"], ["x"], ["x"])
    assert divide({"x": ["x"]}, {"a": aside, "b": other}) == {"x": reader}


def test_what_a_replica_reads_that_divides_nothing_stays_with_it() -> None:
    silent, able = replica([], ["x1"]), replica(["x"])
    readers = divide({"x": ["x1", "x2"]}, {"a": silent, "b": able})
    assert readers == {"x1": "a", "x2": "b"}
