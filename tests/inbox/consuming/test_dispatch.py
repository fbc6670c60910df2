"""Dispatching: room for more messages, order, parking, and the drain."""

import asyncio
from collections.abc import Callable
from datetime import timedelta

import pytest

from pillarbox import Message
from pillarbox.inbox.consuming.dispatch import Dispatcher
from pillarbox.inbox.consuming.fair_scheduler import FairScheduler
from pillarbox.inbox.source import Delivery
from pillarbox.inbox.sources.memory import MemoryDelivery, MemorySource
from pillarbox.outbox.lane import Priority

NOW = timedelta(0)
HOUR = timedelta(hours=1)


def delivery(
    name: str,
    key: str | None = None,
    tenant: str | None = None,
    priority: Priority = Priority.DEFAULT,
) -> Delivery:
    message = Message(name, b"", key=key, tenant=tenant, priority=priority)
    return MemoryDelivery(source=MemorySource(), message=message)


class Work:
    """Starts deliveries, and ends them on demand."""

    def __init__(
        self,
        max_in_flight: int = 2,
        max_waiting: int = 3,
        *,
        max_lines: int | None = None,
        max_per_tenant: int | None = None,
        max_bytes: int = 1024,
        in_order: bool = True,
    ) -> None:
        self.dispatcher = Dispatcher(
            self._do,
            scheduler=FairScheduler(
                max_in_flight,
                {"default": 1},
                max_per_tenant=max_per_tenant,
                on_capped=lambda: self.dispatcher.wake(),
            ),
            queue="default",
            max_lines=max_lines or max_in_flight,
            max_waiting=max_waiting,
            max_bytes=max_bytes,
            in_order=in_order,
        )
        self.begun: list[str] = []
        self.done: list[str] = []
        self._end: dict[str, asyncio.Event] = {}
        self._changed = asyncio.Event()

    async def _do(self, delivery: Delivery) -> bool:
        if delivery.message.topic.startswith("park"):
            return await self._work(delivery.message.topic)
        async with self.dispatcher.slot(delivery.message):
            return await self._work(delivery.message.topic)

    async def _work(self, name: str) -> bool:
        self.begun.append(name)
        self._changed.set()
        if name.startswith("raise"):
            raise RuntimeError(name)
        if name.startswith("park") and not await self.dispatcher.park(HOUR):
            return False
        await self._end.setdefault(name, asyncio.Event()).wait()
        self.done.append(name)
        self._changed.set()
        return True

    def end(self, *names: str) -> None:
        for name in names:
            self._end.setdefault(name, asyncio.Event()).set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


async def test_messages_of_a_key_are_handled_in_order_and_keys_concurrently() -> None:
    work = Work()
    work.dispatcher.accept(
        [delivery("a1", "a"), delivery("a2", "a"), delivery("b1", "b")]
    )
    await work.until(lambda: len(work.begun) == 2)
    assert work.begun == ["a1", "b1"]
    work.end("a1")
    await work.until(lambda: work.begun == ["a1", "b1", "a2"])
    work.end("a2", "b1")
    assert await work.dispatcher.stop(HOUR) == []


async def test_the_order_of_a_key_is_that_within_a_priority() -> None:
    work = Work()
    first, second = delivery("a1", "a"), delivery("a2", "a")
    urgent = delivery("a3", "a", priority=Priority.REALTIME)
    work.dispatcher.accept([first, second, urgent])
    await work.until(lambda: work.begun == ["a1", "a3"])
    work.end("a3", "a1")
    await work.until(lambda: work.begun == ["a1", "a3", "a2"])
    work.end("a2")
    assert await work.dispatcher.stop(HOUR) == []


async def test_an_urgent_message_gets_the_next_slot() -> None:
    work = Work(max_in_flight=1, max_lines=9)
    bulk = [delivery(f"{n}", priority=Priority.BULK) for n in range(5)]
    work.dispatcher.accept(bulk)
    await work.until(lambda: work.begun == ["0"])
    work.dispatcher.accept([delivery("urgent", priority=Priority.REALTIME)])
    work.end("0", "urgent", *map(str, range(5)))
    await work.until(lambda: len(work.done) == 6)
    assert work.done == ["0", "urgent", "1", "2", "3", "4"]
    await work.dispatcher.stop(HOUR)


async def test_a_line_whose_task_is_cancelled_before_a_stop_is_an_error() -> None:
    work, before = Work(), asyncio.all_tasks()
    work.dispatcher.accept([delivery("a1", "a"), delivery("a2", "a")])
    await work.until(lambda: work.begun == ["a1"])
    lines = asyncio.all_tasks() - before
    for task in lines:
        task.cancel()
    await asyncio.wait(lines)
    with pytest.raises(RuntimeError, match="a line's task was cancelled"):
        await work.dispatcher.wait_for_room()
    with pytest.raises(RuntimeError, match="a line's task was cancelled"):
        await work.dispatcher.stop(HOUR)
    assert work.begun == ["a1"]


@pytest.mark.parametrize(("key", "in_order"), [(None, True), ("a", False)])
async def test_without_a_key_or_without_order_messages_do_not_wait(
    key: str | None, in_order: bool
) -> None:
    work = Work(max_in_flight=3, in_order=in_order)
    work.dispatcher.accept([delivery(name, key) for name in "123"])
    await work.until(lambda: work.begun == ["1", "2", "3"])
    work.end("1", "2", "3")
    await work.dispatcher.stop(HOUR)


async def test_room_counts_running_keys_and_not_the_messages_behind_them() -> None:
    work = Work(max_in_flight=2, max_waiting=3)
    assert work.dispatcher.room == 2
    work.dispatcher.accept([delivery("a1", "a"), delivery("a2", "a")])
    assert work.dispatcher.room == 1
    work.dispatcher.accept([delivery("b1", "b")])
    assert work.dispatcher.room == 0
    work.end("b1")
    assert await work.dispatcher.wait_for_room() == 1
    work.end("a1", "a2")
    await work.dispatcher.stop(HOUR)


async def test_parked_messages_free_slots_until_too_many_wait() -> None:
    work = Work(max_in_flight=1, max_waiting=1)
    work.dispatcher.accept([delivery("park a", "a")])
    assert await work.dispatcher.wait_for_room() == 1
    work.dispatcher.accept([delivery("park b", "b")])
    await work.until(lambda: len(work.begun) == 2)
    assert work.dispatcher.room == 0
    await work.dispatcher.stop(HOUR)


async def test_a_stop_waits_for_running_handlers_and_releases_the_rest() -> None:
    work = Work(max_in_flight=1, max_waiting=5, max_lines=3)
    last, slotless = delivery("a2", "a"), delivery("c1")
    parked, behind = delivery("park b", "b"), delivery("b2", "b")
    work.dispatcher.accept([delivery("a1", "a"), last, parked, behind, slotless])
    await work.until(lambda: len(work.begun) == 2)
    stopping = asyncio.create_task(work.dispatcher.stop(HOUR))
    await work.dispatcher.stopping.wait()
    work.end("a1")
    assert await stopping == [last, parked, behind, slotless]
    assert work.done == ["a1"]


async def test_handlers_that_outlast_the_drain_are_cancelled_and_nacked() -> None:
    work = Work()
    stuck = delivery("a1", "a")
    work.dispatcher.accept([stuck])
    await work.until(lambda: work.begun == ["a1"])
    assert await work.dispatcher.stop(NOW) == [stuck]


async def test_a_second_cancellation_ends_the_drain() -> None:
    work = Work()
    stuck = delivery("a1", "a")
    work.dispatcher.accept([stuck])
    stopping = asyncio.create_task(work.dispatcher.stop(HOUR))
    await work.dispatcher.stopping.wait()
    stopping.cancel()
    assert await stopping == [stuck]


async def test_an_internal_error_is_not_swallowed() -> None:
    work = Work(max_in_flight=1)
    work.dispatcher.accept([delivery("raise")])
    with pytest.raises(RuntimeError, match="raise"):
        await work.dispatcher.wait_for_room()


async def test_messages_of_a_tenant_at_its_limit_take_no_room_from_others() -> None:
    work = Work(max_in_flight=3, max_waiting=5, max_per_tenant=1)
    work.dispatcher.accept([delivery(f"a{n}", tenant="a") for n in range(3)])
    await work.until(lambda: work.begun == ["a0"])
    assert await work.dispatcher.wait_for_room() == 2
    assert work.dispatcher.tenants_over_share == {"a"}
    work.dispatcher.accept([delivery("b0", tenant="b")])
    await work.until(lambda: work.begun == ["a0", "b0"])
    work.end("a0", "a1", "a2", "b0")
    await work.until(lambda: len(work.done) == 4)
    assert work.dispatcher.tenants_over_share == set()
    await work.dispatcher.stop(HOUR)


async def test_a_tenants_long_backlog_is_reported_before_it_fills_the_buffer() -> None:
    work = Work(max_in_flight=2, max_waiting=8)
    work.dispatcher.accept([delivery(f"a{n}", "a", tenant="a") for n in range(5)])
    assert work.dispatcher.tenants_over_share == set()
    work.dispatcher.accept([delivery("a5", "a", tenant="a")])
    assert work.dispatcher.tenants_over_share == {"a"}
    assert work.dispatcher.room == 1
    await work.dispatcher.stop(NOW)


def flood(priority: Priority, count: int) -> list[Delivery]:
    return [delivery(f"{n}", priority, priority=priority) for n in range(count)]


async def test_a_flood_of_one_key_leaves_room_for_other_priorities() -> None:
    work = Work(max_in_flight=4, max_waiting=16)
    left_out: set[Priority] = set()
    for priority in (Priority.BULK, Priority.DEFAULT, Priority.REALTIME):
        assert work.dispatcher.room
        assert work.dispatcher.priorities_over_share == left_out
        while priority not in work.dispatcher.priorities_over_share:
            work.dispatcher.accept(flood(priority, 1))
        left_out.add(priority)
    await work.dispatcher.stop(NOW)


async def test_many_keys_of_one_priority_fill_all_slots_and_lines() -> None:
    work = Work(max_in_flight=2, max_waiting=4, max_lines=4)
    work.dispatcher.accept([delivery(f"{n}") for n in range(3)])
    assert work.dispatcher.priorities_over_share == set()
    assert work.dispatcher.room == 1
    await work.dispatcher.stop(NOW)


def large(size: int) -> Delivery:
    return MemoryDelivery(source=MemorySource(), message=Message("large", bytes(size)))


async def test_payloads_reserve_and_release_memory() -> None:
    work = Work(max_in_flight=100, max_bytes=1000)
    assert work.dispatcher.room == 100

    # Room for as many more as would fit at this average size.
    work.dispatcher.accept([large(200), large(200)])
    assert work.dispatcher.room == 3
    # A message larger than the remaining memory is accepted, and no more after it.
    work.dispatcher.accept([large(450)])
    assert work.dispatcher.room == 1
    work.dispatcher.accept([large(5000)])
    assert work.dispatcher.room == 0

    waiting = asyncio.create_task(work.dispatcher.wait_for_room())
    await work.until(lambda: len(work.begun) == 4)
    work.end("large")
    assert await waiting > 0
    await work.dispatcher.stop(HOUR)
    assert work.dispatcher.room == 100
