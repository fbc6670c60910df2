"""While the broker is unavailable: one trial at a time, after randomized waits."""

import asyncio

import pytest

from pillarbox.outbox.events import Event
from pillarbox.relay.breaker import Breaker
from pillarbox.relay.events import BrokerLost, BrokerRecovered


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the waits of the breaker, which here are recorded but not slept."""
    waited: list[float] = []

    async def note(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr("pillarbox.relay.breaker.asyncio.sleep", note)
    return waited


class RecordedBreaker:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.breaker = Breaker(self.events.append)

    def delays(self) -> list[float]:
        return [e.seconds for e in self.events if isinstance(e, BrokerLost)]


async def test_only_while_the_breaker_is_open_does_a_batch_wait(
    waits: list[float],
) -> None:
    recorded = RecordedBreaker()
    async with recorded.breaker.admit(), recorded.breaker.admit():
        pass
    recorded.breaker.close()
    assert (waits, recorded.events) == ([], [])

    recorded.breaker.open("gone")
    # A trial without messages costs no second wait.
    for _ in range(3):
        async with recorded.breaker.admit():
            pass
    assert recorded.events == [BrokerLost(reason="gone", seconds=waits[0])]
    assert len(waits) == 1

    for _ in range(2):
        recorded.breaker.close()
    assert [type(event) for event in recorded.events] == [BrokerLost, BrokerRecovered]
    async with recorded.breaker.admit():
        pass
    assert len(waits) == 1


async def test_one_batch_is_the_trial_and_the_others_wait_for_its_outcome(
    waits: list[float],
) -> None:
    recorded = RecordedBreaker()
    recorded.breaker.open("gone")
    order: list[str] = []

    async def try_it(name: str) -> None:
        async with recorded.breaker.admit():
            order.append(f"{name} in")
            # The other batch would be admitted here if that were possible.
            await asyncio.get_running_loop().run_in_executor(None, int)
            recorded.breaker.close()
            order.append(f"{name} out")

    await asyncio.gather(try_it("a"), try_it("b"))

    assert order == ["a in", "a out", "b in", "b out"]
    assert len(waits) == 1


async def test_a_failed_trial_makes_the_next_one_wait_again(
    waits: list[float],
) -> None:
    recorded = RecordedBreaker()
    recorded.breaker.open("gone")

    for _ in range(3):
        async with recorded.breaker.admit():
            recorded.breaker.open("still gone")

    assert waits == recorded.delays()[:3]


def test_the_waits_grow_to_a_cap_and_start_over_after_success() -> None:
    recorded = RecordedBreaker()

    for _ in range(500):
        recorded.breaker.open("gone")

    delays = recorded.delays()
    assert all(0.1 <= delay <= 1 for delay in delays)
    assert delays[0] <= 0.3
    assert max(delays) > 0.9
    recorded.breaker.close()
    recorded.breaker.open("gone")
    assert recorded.delays()[-1] <= 0.3
