"""The order of tenants' rows, and when to search for tenants hidden by a flood."""

import pytest

from pillarbox import Message
from pillarbox.inbox.sources.memory import MemoryDelivery, MemorySource
from pillarbox.inbox.sources.postgres.ready import Ready
from pillarbox.inbox.sources.postgres.tenants import Tenants, TenantsFound


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tenants(clock: Clock) -> Tenants:
    return Tenants(64, clock)


def ready(*names: str) -> Ready[MemoryDelivery]:
    """Make ready items from names like `a1`: a tenant and a number."""
    made: Ready[MemoryDelivery] = Ready()
    for name in names:
        message = Message(name, b"", tenant=name[0].strip("-") or None)
        made.add(MemoryDelivery(source=MemorySource(), message=message))
    return made


def taken(ready: Ready[MemoryDelivery], limit: int, *without: str) -> list[str]:
    return [item.message.topic for item in ready.take(limit, without)]


def test_tenants_take_turns_and_each_keeps_its_order() -> None:
    line = ready("a1", "a2", "a3", "b1", "-1", "-2")
    assert taken(line, 4) == ["a1", "b1", "-1", "a2"]
    assert taken(line, 9) == ["-2", "a3"]
    assert len(line) == 0


def test_a_round_resumes_where_the_last_one_ended() -> None:
    line = ready("a1", "a2", "b1", "b2", "c1")
    assert [taken(line, 1) for _ in range(5)] == [
        ["a1"],
        ["b1"],
        ["c1"],
        ["a2"],
        ["b2"],
    ]


def test_a_skipped_tenant_keeps_its_position() -> None:
    line = ready("a1", "b1", "a2", "b2")
    assert taken(line, 9, "a") == ["b1", "b2"]
    assert line.stocked(1) == ["a"]
    assert taken(line, 9) == ["a1", "a2"]


def test_unwanted_items_are_removed_and_returned() -> None:
    line = ready("a1", "b1", "a2")
    removed = line.remove(lambda item: item.message.topic in {"a1", "b1"})
    assert [item.message.topic for item in removed] == ["a1", "b1"]
    assert taken(line, 9) == ["a2"]


def due(tenants: Tenants, *in_memory: str, ready: int = 10) -> bool:
    return tenants.is_due(ready, list(in_memory), stuck=False)


def test_a_claim_that_returns_everything_needs_no_search(tenants: Tenants) -> None:
    tenants.claimed(["a"] * 3, full=False)
    assert not due(tenants, "a")


def test_a_full_claim_needs_a_search_and_another_after_a_while(
    tenants: Tenants, clock: Clock
) -> None:
    tenants.claimed(["a"] * 64, full=True)
    assert due(tenants, "a")
    tenants.searched(TenantsFound(["", "a"], []), ["a"])
    assert not due(tenants, "a")
    clock.now += 1
    assert due(tenants, "a")


def test_a_flood_without_tenants_is_searched_only_at_intervals(
    tenants: Tenants, clock: Clock
) -> None:
    for _ in range(3):
        tenants.claimed([None] * 64, full=True)
        clock.now += 0.01
        if due(tenants):
            tenants.searched(TenantsFound([""], []), [])
        tenants.claimed([None] * 64, full=True)
        assert not due(tenants)


def test_tenants_without_ready_messages_are_searched_after_enough_deliveries(
    tenants: Tenants,
) -> None:
    tenants.claimed(["a", "b"] * 32, full=True)
    tenants.searched(TenantsFound([""], []), ["a", "b"])
    tenants.handed_out(2)
    assert not due(tenants, "a")
    tenants.handed_out(20)
    assert due(tenants, "a")
    assert not due(tenants, "a", "b")
    tenants.searched(TenantsFound(["", "a"], []), ["a"])
    tenants.handed_out(40)
    assert not due(tenants, "a"), "b has no more"


def test_an_interrupted_search_continues_after_its_last_tenant(
    tenants: Tenants,
) -> None:
    tenants.claimed(["a"] * 64, full=True)
    tenants.searched(TenantsFound(["", "b", "c"], ["b", "c"], is_cut=True), ["a"])
    assert tenants.after == "c"
    assert due(tenants, "a", "b", "c")
    tenants.searched(TenantsFound(["c", "d"], ["d"]), ["a", "b", "c"])
    assert tenants.after == ""


def test_no_search_is_due_when_memory_is_full(tenants: Tenants) -> None:
    tenants.claimed(["a"] * 64, full=True)
    assert not due(tenants, "a", ready=10_000)


def test_each_tenants_share_shrinks_with_the_number_of_tenants(
    tenants: Tenants,
) -> None:
    tenants.searched(TenantsFound(["", "b"], ["b"]), ["a"])
    assert tenants.rows_each == 32
    tenants.searched(TenantsFound([""], [f"t{n}" for n in range(30)]), ["a"])
    assert tenants.rows_each == 4


def test_a_search_for_tenants_that_are_not_left_out_is_repeated_after_a_while(
    tenants: Tenants, clock: Clock
) -> None:
    assert tenants.is_due(10, ["a"], stuck=True)
    tenants.searched(TenantsFound(["", "a"], []), ["a"])
    assert not tenants.is_due(10, ["a"], stuck=True)
    clock.now += 1
    assert tenants.is_due(10, ["a"], stuck=True)
