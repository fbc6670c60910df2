"""A consumer's RabbitMQ queue in shards: how they are dealt, shared and changed."""

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from pika import BasicProperties
from pika.exceptions import ChannelClosedByBroker

from pillarbox.inbox.sources.rabbitmq import RabbitMQSource
from pillarbox.outbox.brokers.rabbitmq.amqp import Channel
from pillarbox.outbox.brokers.shards import Shard
from pillarbox.outbox.errors import BrokerUnavailableError, ConfigError
from pillarbox.outbox.gather import end
from tests.fixtures.consumers import numbered
from tests.fixtures.proxy import MakeProxy
from tests.fixtures.rabbitmq import RawProperties, channel_of, put_bytes, user
from tests.fixtures.sources import payloads, publish, receive_despite_losses
from tests.fixtures.urls import with_options
from tests.fixtures.waiting import let_pass, wait_for
from tests.servers.rabbitmq import RabbitMQServer

SOON = timedelta(milliseconds=50)


@pytest.fixture
def consumer() -> str:
    """A consumer name that no other test uses."""
    return f"billing-{uuid4().hex}"


@asynccontextmanager
async def source(
    url: str, consumer: str, of: int, **options: object
) -> AsyncIterator[RabbitMQSource]:
    async with RabbitMQSource(
        with_options(url, shards=of, **options),
        consumer=consumer,
        topics=["orders"],
        poll_interval=SOON,
    ) as entered:
        yield entered


class Replica:
    """A replica that handles what it receives, as a consumer with receipts does.

    Attributes:
        count: how many messages it has handled.
        fails: the numbers of messages that it handles at the second attempt.
        delay: after how long.
        task: runs it.
    """

    task: asyncio.Task[None]

    def __init__(self, source: RabbitMQSource, handled: dict[int, str | None]) -> None:
        self.source = source
        self.count = 0
        self.fails = {50}
        self.delay = timedelta(seconds=1)
        self._handled = handled

    async def run(self) -> None:
        while True:
            with suppress(BrokerUnavailableError):
                failed: set[str | None] = set()
                for delivery in await self.source.receive(limit=10):
                    (number,) = payloads([delivery])
                    if number in self.fails:
                        self.fails.remove(number)
                        failed.add(delivery.message.key)
                        await delivery.nack(self.delay)
                        continue
                    if delivery.message.key in failed:
                        await delivery.nack()
                        continue
                    if number not in self._handled:
                        self._handled[number] = delivery.message.key
                        self.count += 1
                    await delivery.ack()


@asynccontextmanager
async def replica(
    url: str,
    consumer: str,
    of: int,
    handled: dict[int, str | None],
    **options: object,
) -> AsyncIterator[Replica]:
    async with source(url, consumer, of, **options) as entered:
        running = Replica(entered, handled)
        task = running.task = asyncio.create_task(running.run())
        try:
            yield running
        finally:
            await end([task])


async def until(holds: Callable[[], object], seconds: float = 15) -> float:
    """Wait for a condition; return after how many seconds it holds."""
    began = time.monotonic()
    await asyncio.to_thread(wait_for, "it holds", holds, seconds=seconds)
    return time.monotonic() - began


def reads(*replicas: Replica) -> list[int]:
    """Return how many shards each replica reads."""
    return [len(each.source._shards.queues) for each in replicas]


def deals(source: RabbitMQSource) -> bool:
    """Return whether a replica consumes from the consumer's queue, and deals it."""
    return source._dealer is not None


def expect_in_order(handled: dict[int, str | None], count: int) -> None:
    assert sorted(handled) == list(range(count))
    for key in set(handled.values()):
        of_key = [number for number, its in handled.items() if its == key]
        assert of_key == sorted(of_key)


def queues(url: str, *names: str) -> list[str]:
    """Return which of these queues exist."""
    found: list[str] = []
    for name in names:
        with channel_of(url) as channel, suppress(ChannelClosedByBroker):
            channel.queue_declare(name, passive=True)
            found.append(name)
    return found


def of_layout(consumer: str, of: int) -> list[str]:
    return [shard.name for shard in Shard(consumer, of=of).all]


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
async def test_replicas_share_shards_evenly_in_order_and_take_over(
    rabbitmq_url: str, proxy: MakeProxy, consumer: str, queue_type: str
) -> None:
    server, url = proxy(rabbitmq_url)
    handled: dict[int, str | None] = {}
    async with AsyncExitStack() as stack:
        replicas: list[Replica] = []
        for address in (rabbitmq_url, url, rabbitmq_url):
            made = replica(address, consumer, 8, handled, queue_type=queue_type)
            replicas.append(await stack.enter_async_context(made))
        await until(lambda: sorted(reads(*replicas)) == [2, 3, 3])
        await publish(rabbitmq_url, *numbered(600, keys=80))
        await until(lambda: len(handled) == 600)
        expect_in_order(handled, 600)
        assert all(each.count > 60 for each in replicas)
        for each in replicas:
            assert not each.source.abilities.standing_by()
        await asyncio.to_thread(server.cut)  # as a kill does
        await publish(rabbitmq_url, *numbered(1200, keys=80)[600:])
        await until(lambda: len(handled) == 1200)
    expect_in_order(handled, 1200)


@pytest.mark.parametrize(("before", "after"), [(1, 8), (8, 1), (8, 3), (2, 5)])
async def test_another_number_empties_the_shards_and_deletes_them_first(
    rabbitmq_url: str, consumer: str, before: int, after: int
) -> None:
    handled: dict[int, str | None] = {}
    async with source(rabbitmq_url, consumer, before) as old:
        await publish(rabbitmq_url, *numbered(200, keys=20))
        held = await receive_despite_losses(old, 100)
        for delivery in held[:20]:
            handled[payloads([delivery])[0]] = delivery.message.key
            await delivery.ack()
        async with replica(rabbitmq_url, consumer, after, handled) as new:
            await until(lambda: new.source.abilities.standing_by())
            await publish(rabbitmq_url, *numbered(300, keys=20)[200:])
            assert len(handled) == 20
            await old.__aexit__()
            await until(lambda: len(handled) == 300)
            await publish(rabbitmq_url, *numbered(400, keys=20)[300:])
            await until(lambda: len(handled) == 400)
            assert not new.source.abilities.standing_by()
    expect_in_order(handled, 400)
    left = [] if before == 1 else queues(rabbitmq_url, *of_layout(consumer, before))
    assert left == []


STEPS = [
    *("exchange_delete shard-1-of-2", "exchange_delete shard-1-of-16"),
    *("queue_declare shards-of-2", "queue_declare shard-1-of-2"),
    *("queue_bind shard-2-of-2", "queue_delete shards-of-2"),
    *("queue_delete shard-2-of-2", "exchange_delete shard-2-of-2"),
    *("queue_delete shard-1-of-2", "exchange_delete shard-1-of-2 again"),
    *("queue_declare shard-2-of-2.owner", "basic_consume shard-2-of-2"),
    *("queue_declare shard-1-of-3", "exchange_declare shard-1-of-3"),
    *("queue_bind shard-1-of-3", "queue_bind shard-3-of-3", "confirm_delivery"),
]


@pytest.mark.parametrize("step", STEPS)
async def test_a_change_that_is_cut_off_at_any_step_is_completed_by_another_replica(
    rabbitmq_url: str,
    proxy: MakeProxy,
    consumer: str,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    """It is cut off as the server does with a frozen one, which wakes up later."""
    frozen, awake, seen = asyncio.Event(), asyncio.Event(), set[str]()
    handled: dict[int, str | None] = {}
    server, url = proxy(rabbitmq_url)
    ask = Channel.ask

    async def ask_or_freeze(channel: Channel, method: Any, **arguments: Any) -> Any:
        if begun and asyncio.current_task() is begun[0].task:
            name = str(arguments.get("queue", arguments.get("exchange", "")))
            request = f"{method.__name__} {name.removeprefix(consumer)[1:]}".strip()
            request += " again" if request in seen else ""
            seen.add(request)
            if request == step and not frozen.is_set():
                frozen.set()
                await awake.wait()
        return await ask(channel, method, **arguments)

    begun: list[Replica] = []
    monkeypatch.setattr(Channel, "ask", ask_or_freeze)
    async with source(rabbitmq_url, consumer, 2) as old:
        await publish(rabbitmq_url, *numbered(100, keys=20))
        await receive_despite_losses(old, 50)
    await publish(rabbitmq_url, *numbered(200, keys=20)[100:])
    async with replica(url, consumer, 3, handled) as first:
        begun.append(first)
        async with asyncio.timeout(20):
            await frozen.wait()
        async with replica(rabbitmq_url, consumer, 3, handled) as second:
            await asyncio.to_thread(server.cut)
            await until(lambda: len(handled) == 200)
            await until(lambda: deals(second.source))
            awake.set()
            await publish(rabbitmq_url, *numbered(300, keys=20)[200:])
            await until(lambda: len(handled) == 300)
            await until(lambda: sorted(reads(first, second)) == [1, 2])
    expect_in_order(handled, 300)
    assert not queues(rabbitmq_url, *of_layout(consumer, 2))


async def test_a_retry_holds_up_a_change_and_nothing_new_is_handled_before(
    rabbitmq_url: str, consumer: str
) -> None:
    handled: dict[int, str | None] = {}
    async with source(rabbitmq_url, consumer, 2) as old:
        await publish(rabbitmq_url, *numbered(100, keys=20))
        await receive_despite_losses(old, 100)
    async with replica(rabbitmq_url, consumer, 3, handled) as new:
        new.fails, new.delay = {0}, timedelta(seconds=4)
        await publish(rabbitmq_url, *numbered(200, keys=20)[100:])
        await until(lambda: len(handled) == 95)  # all but those of key 0
        await asyncio.to_thread(let_pass, 1.5)
        assert sorted(handled) == [n for n in range(100) if n % 20]
        old_queues = of_layout(consumer, 2)
        assert await asyncio.to_thread(queues, rabbitmq_url, *old_queues) == old_queues
        await until(lambda: len(handled) == 200)
    expect_in_order(handled, 200)


async def test_the_number_stays_in_force_while_a_replica_with_it_runs(
    rabbitmq_url: str, consumer: str
) -> None:
    """Also if the replica that deals is the one that stops, or another one starts."""
    handled: dict[int, str | None] = {}
    async with AsyncExitStack() as stack:
        dealing, other = AsyncExitStack(), AsyncExitStack()
        for each in (stack, other, dealing):
            await stack.enter_async_context(each)
        first = await dealing.enter_async_context(
            replica(rabbitmq_url, consumer, 2, handled)
        )
        await until(lambda: deals(first.source))
        second = await other.enter_async_context(
            replica(rabbitmq_url, consumer, 2, handled)
        )
        new = await stack.enter_async_context(
            replica(rabbitmq_url, consumer, 3, handled)
        )
        await until(lambda: reads(first, second, new) == [1, 1, 0])
        await dealing.aclose()
        await until(lambda: deals(second.source) and reads(second) == [2])
        await publish(rabbitmq_url, *numbered(100, keys=20))
        await until(lambda: len(handled) == 100)
        assert second.count == 100
        assert new.source.abilities.standing_by()
        await other.aclose()
        await until(lambda: deals(new.source) and reads(new) == [3])
    assert queues(rabbitmq_url, *of_layout(consumer, 2)) == []


async def test_a_replica_with_the_old_number_stops_a_change(
    rabbitmq_url: str, consumer: str
) -> None:
    handled: dict[int, str | None] = {}
    async with source(rabbitmq_url, consumer, 2) as before:
        await publish(rabbitmq_url, *numbered(100, keys=20))
        await receive_despite_losses(before, 100)
    async with replica(rabbitmq_url, consumer, 3, handled) as new:
        new.fails, new.delay = {0}, timedelta(hours=1)
        await until(lambda: len(handled) == 95)
        async with replica(rabbitmq_url, consumer, 2, handled) as old:
            await until(lambda: len(handled) == 100)
            await publish(rabbitmq_url, *numbered(200, keys=20)[100:])
            await until(lambda: len(handled) == 200)
            assert old.count == 105
            assert new.source.abilities.standing_by()
    expect_in_order(handled, 200)


async def test_another_number_waits_and_says_what_for(
    rabbitmq_url: str, consumer: str
) -> None:
    async with AsyncExitStack() as stack:
        old = await stack.enter_async_context(replica(rabbitmq_url, consumer, 2, {}))
        await until(lambda: reads(old) == [2] and deals(old.source))
        async with source(rabbitmq_url, consumer, 3) as new:
            assert not await new.receive(limit=1)
            (waits,) = new.abilities.warnings()
            assert list(new.abilities.standing_by()) == ["orders"]
            assert "is in use with shards=2; this replica has shards=3" in waits
            await stack.aclose()
            async with asyncio.timeout(15):
                while new.abilities.standing_by() or new.abilities.warnings():
                    assert not await new.receive(limit=1)


async def test_what_other_producers_publish_is_dealt_out_with_all_that_it_has(
    rabbitmq_url: str, consumer: str
) -> None:
    """Also what names its own user."""
    number = b"\x06numberl" + struct.pack(">q", -1)
    table = b"".join(
        bytes([len(name)]) + name + b"S" + struct.pack(">I", len(value)) + value
        for name, value in (
            (b"cloudEvents_id", str(uuid4()).encode()),
            (b"cloudEvents_specversion", b"1.0"),
            (b"cloudEvents_type", b"orders"),
            (b"cloudEvents_source", b"elsewhere"),
            (b"cloudEvents_partitionkey", b"k"),
        )
    )
    async with source(rabbitmq_url, consumer, 4) as only:
        put_bytes(rabbitmq_url, b"orders", b"1", RawProperties(table + number))
        properties = BasicProperties(user_id="guest")  # type: ignore[no-untyped-call]
        put_bytes(rabbitmq_url, b"orders", b"2", properties)
        found = await receive_despite_losses(only, 2)
        await publish(rabbitmq_url, *numbered(3))
        await receive_despite_losses(only, 3)
    (one,) = (each for each in found if each.message.payload == b"1")
    assert one.problem is None
    assert one.message.key == "k"
    assert one.message.headers["number"] == "-1"
    (other,) = (each for each in found if each.message.payload == b"2")
    assert other.problem is not None
    assert other.message.topic == "orders"


async def test_a_shard_whose_queue_was_deleted_is_created_again(
    rabbitmq_url: str, consumer: str
) -> None:
    handled: dict[int, str | None] = {}
    async with replica(rabbitmq_url, consumer, 2, handled) as only:
        await publish(rabbitmq_url, *numbered(20, keys=20))
        await until(lambda: len(handled) == 20)
        with channel_of(rabbitmq_url) as channel:
            channel.queue_delete(f"{consumer}.shard-1-of-2")
        await publish(rabbitmq_url, *numbered(40, keys=20)[20:])
        await until(lambda: len(handled) == 40)
        await until(lambda: reads(only) == [2])


async def test_shards_are_refused_where_rabbitmq_chooses_who_receives(
    rabbitmq_url: str, consumer: str
) -> None:
    with pytest.raises(
        ConfigError, match="shards=2: can't be combined with single_active_consumer"
    ):
        async with source(rabbitmq_url, consumer, 2, single_active_consumer=True):
            pass
    made = RabbitMQSource(f"{rabbitmq_url}&shards=2", consumer="c", topics=["orders"])
    with pytest.raises(ConfigError, match="shards=2: can't be combined with"):
        made.abilities.share()


@pytest.mark.parametrize("single", [False, True])
async def test_a_consumer_without_order_is_refused_while_its_queue_has_shards(
    rabbitmq_url: str, consumer: str, single: bool
) -> None:
    options = "&single_active_consumer=true" if single else ""
    with channel_of(rabbitmq_url) as channel:
        arguments: dict[str, Any] = {"x-queue-type": "quorum"}
        if single:
            arguments["x-single-active-consumer"] = True
        channel.queue_declare(consumer, durable=True, arguments=arguments)
        shard = f"{consumer}.shard-1-of-2"
        channel.exchange_declare(shard, "topic", durable=True)
        channel.queue_bind(consumer, shard, "#")
    unordered = RabbitMQSource(
        f"{rabbitmq_url}{options}", consumer=consumer, topics=["orders"]
    )
    if not single:
        unordered.abilities.share()
    with pytest.raises(ConfigError, match=r'2 shards; first run .* order="key"'):
        await unordered.__aenter__()


async def test_a_consumer_with_shards_needs_the_rights_for_them(
    shared_rabbitmq: RabbitMQServer, rabbitmq_url: str, consumer: str
) -> None:
    async with source(rabbitmq_url, consumer, 2) as first:
        assert not await first.receive(limit=1)
        assert deals(first)
    with user(shared_rabbitmq, consumer, "secret", rf"^{consumer}\.owner$"):
        url = rabbitmq_url.replace("guest:guest", f"{consumer}:secret")
        with pytest.raises(ConfigError, match=r"grant the user configure, write and"):
            async with source(url, consumer, 2):
                pass
        async with source(url, f"{consumer}", 1) as other:
            assert not await other.receive(limit=1)
