"""Slots: limited, never lost, and shared by weight, tenant and order of arrival."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pillarbox.inbox.consuming.fair_scheduler import FairScheduler, Tenant
from pillarbox.outbox.lane import PRIORITIES, Priority
from pillarbox.outbox.lane import WEIGHTS as SHARES

WEIGHTS = {"realtime": 3, "default": 1, "batch": 2}

queues = st.sampled_from(sorted(WEIGHTS))
tenants = st.sampled_from([None, "a", "b", "c"])
priorities = st.sampled_from(PRIORITIES)
arrivals = st.tuples(st.just("arrive"), queues, tenants, priorities)
choices = st.tuples(
    st.sampled_from(["end", "cancel", "cancel what was just granted"]),
    st.integers(0, 99),
    st.none(),
    st.none(),
)
weights = st.dictionaries(
    st.sampled_from("xyz"), st.integers(1, 4), min_size=1, max_size=3
)


class Ticket:
    """A task that requests a slot."""

    def __init__(self, queue: str, tenant: Tenant, priority: Priority) -> None:
        self.queue = queue
        self.priority = priority
        self.tenant = tenant
        self.end = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class Simulation:
    """The tasks that wait, that hold a slot, and that were served, each in order."""

    def __init__(
        self, places: int, weights: Mapping[str, int] = WEIGHTS, cap: int | None = None
    ) -> None:
        self.scheduler = FairScheduler(places, weights, max_per_tenant=cap)
        self.waiting: list[Ticket] = []
        self.at_work: list[Ticket] = []
        self.served: list[Ticket] = []

    def arrive(
        self,
        queue: str,
        tenant: Tenant = None,
        priority: Priority = Priority.DEFAULT,
    ) -> Ticket:
        ticket = Ticket(queue, tenant, priority)
        self.waiting.append(ticket)
        ticket.task = asyncio.create_task(self._work(ticket))
        return ticket

    async def _work(self, ticket: Ticket) -> None:
        await self.scheduler.acquire(ticket.queue, ticket.priority, ticket.tenant)
        try:
            self.waiting.remove(ticket)
            self.at_work.append(ticket)
            self.served.append(ticket)
            try:
                await ticket.end.wait()
            finally:
                self.at_work.remove(ticket)
        finally:
            self.scheduler.release(ticket.tenant)

    async def cancel(self, ticket: Ticket) -> None:
        assert ticket.task is not None
        ticket.task.cancel()
        await run_ready_tasks()
        if ticket in self.waiting:
            self.waiting.remove(ticket)

    async def serve_all(self) -> None:
        await run_ready_tasks()
        while self.at_work:
            self.at_work[0].end.set()
            await run_ready_tasks()


async def run_ready_tasks() -> None:
    """Let all tasks run that can."""
    loop = asyncio.get_running_loop()
    for _ in range(4):
        passed = loop.create_future()
        loop.call_soon(passed.set_result, None)
        await passed


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


@given(
    st.integers(1, 4),
    st.none() | st.integers(1, 3),
    st.lists(arrivals | choices, max_size=40),
)
def test_slots_are_never_exceeded_idle_or_lost(
    places: int, cap: int | None, steps: list[tuple[str, Any, Any, Any]]
) -> None:
    async def test() -> None:
        simulation = Simulation(places, cap=cap)
        for step, which, tenant, priority in steps:
            if step == "arrive":
                simulation.arrive(which, tenant, priority)
            elif step == "end" and simulation.at_work:
                simulation.at_work[which % len(simulation.at_work)].end.set()
            elif step == "cancel" and simulation.waiting:
                await simulation.cancel(
                    simulation.waiting[which % len(simulation.waiting)]
                )
            elif step.endswith("granted") and simulation.at_work and simulation.waiting:
                # The slot may be granted at the very moment of the cancellation.
                simulation.at_work[0].end.set()
                await simulation.cancel(
                    simulation.waiting[which % len(simulation.waiting)]
                )
            await run_ready_tasks()
            taken = Counter(ticket.tenant for ticket in simulation.at_work)
            assert len(simulation.at_work) <= places
            full = {t for t in taken if t and cap is not None and taken[t] >= cap}
            assert all(taken[t] == cap for t in full)
            if any(ticket.tenant not in full for ticket in simulation.waiting):
                assert len(simulation.at_work) == places
            for queue in WEIGHTS:
                capped = [t for t in simulation.waiting if t.queue == queue]
                capped = [ticket for ticket in capped if ticket.tenant in full]
                assert simulation.scheduler.capped(queue) == len(capped)
        await simulation.serve_all()
        assert simulation.waiting == []

    run(test)


@given(weights, st.integers(1, 4), st.randoms())
def test_while_all_queues_are_busy_each_gets_its_weight_in_every_round(
    weights: dict[str, int], rounds: int, random: Any
) -> None:
    async def test() -> None:
        simulation = Simulation(1, weights)
        # The first gets its slot before the others arrive, but still counts.
        simulation.arrive(next(iter(weights)))
        await run_ready_tasks()
        line = [queue for queue in weights for _ in range(weights[queue] * rounds)]
        random.shuffle(line)
        for queue in line:
            simulation.arrive(queue)
        await simulation.serve_all()
        served = [ticket.queue for ticket in simulation.served]
        size = sum(weights.values())
        for start in range(0, size * rounds, size):
            assert Counter(served[start : start + size]) == weights

    run(test)


@given(st.dictionaries(tenants, st.integers(1, 12), min_size=1), st.randoms())
def test_tenants_take_turns_and_each_is_served_in_its_own_order(
    counts: dict[Tenant, int], random: Any
) -> None:
    async def test() -> None:
        simulation = Simulation(1, {"default": 1})
        first = simulation.arrive("default", "first")
        await run_ready_tasks()
        line = [tenant for tenant, count in counts.items() for _ in range(count)]
        random.shuffle(line)
        arrived: dict[Tenant, list[Ticket]] = defaultdict(list)
        for tenant in line:
            arrived[tenant].append(simulation.arrive("default", tenant))
        await run_ready_tasks()
        await simulation.serve_all()
        served = [ticket for ticket in simulation.served if ticket is not first]
        for tenant, tickets in arrived.items():
            assert [t for t in served if t.tenant == tenant] == tickets
        for taken in range(len(served)):
            done = Counter(ticket.tenant for ticket in served[:taken])
            busy = [tenant for tenant in counts if done[tenant] < counts[tenant]]
            shares = [done[tenant] for tenant in busy]
            assert max(shares) - min(shares) <= 1

    run(test)


@given(st.integers(1, 40), st.integers(1, 4), st.sampled_from(["x", "y"]))
def test_a_flood_delays_neither_another_tenant_nor_another_queue(
    flood: int, places: int, queue: str
) -> None:
    async def test() -> None:
        simulation = Simulation(places, {"x": 5, "y": 1})
        for _ in range(places + flood):
            simulation.arrive("x", "flooder")
        await run_ready_tasks()
        late = simulation.arrive(queue, "other")
        await run_ready_tasks()
        await simulation.serve_all()
        assert simulation.served.index(late) <= places + 5

    run(test)


@given(
    st.dictionaries(priorities, st.integers(1, 30), min_size=1),
    st.integers(1, 4),
    st.randoms(),
)
def test_while_all_priorities_wait_each_gets_its_share_and_keeps_its_order(
    counts: dict[Priority, int], places: int, random: Any
) -> None:
    async def test() -> None:
        simulation = Simulation(places, {"default": 1})
        first = [simulation.arrive("default") for _ in range(places)]
        await run_ready_tasks()
        line = [priority for priority, count in counts.items() for _ in range(count)]
        random.shuffle(line)
        arrived = [simulation.arrive("default", priority=p) for p in line]
        await run_ready_tasks()
        await simulation.serve_all()
        served = [ticket for ticket in simulation.served if ticket not in first]
        for priority in counts:
            assert [t for t in served if t.priority is priority] == [
                t for t in arrived if t.priority is priority
            ]
        done: Counter[Priority] = Counter()
        for ticket in served:
            waiting = [p for p in counts if done[p] < counts[p]]
            if len(waiting) < len(counts):
                break
            done[ticket.priority] += 1
            shares = sum(SHARES[p] for p in counts)
            for each in counts:
                fair = done.total() * SHARES[each] / shares
                assert abs(done[each] - fair) < len(counts)

    run(test)


@given(st.integers(1, 200), st.integers(1, 4), st.integers(1, 12))
def test_a_flood_of_bulk_delays_urgent_messages_by_few_turns(
    flood: int, places: int, urgent: int
) -> None:
    async def test() -> None:
        simulation = Simulation(places, {"default": 1})
        for n in range(places + flood):
            simulation.arrive("default", f"tenant {n % 7}", Priority.BULK)
        await run_ready_tasks()
        late = [
            simulation.arrive("default", "other", Priority.REALTIME)
            for _ in range(urgent)
        ]
        await run_ready_tasks()
        await simulation.serve_all()
        assert simulation.served.index(late[0]) == places
        assert simulation.served.index(late[-1]) <= places + urgent + urgent // 6 + 1

    run(test)


@given(st.integers(20, 60), st.sampled_from(PRIORITIES[1:]))
def test_a_flood_of_realtime_starves_no_other_priority(
    flood: int, priority: Priority
) -> None:
    async def test() -> None:
        simulation = Simulation(1, {"default": 1})
        for _ in range(flood):
            simulation.arrive("default", priority=Priority.REALTIME)
        late = simulation.arrive("default", priority=priority)
        await run_ready_tasks()
        await simulation.serve_all()
        assert simulation.served.index(late) <= 10

    run(test)
