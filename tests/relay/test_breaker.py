"""While the broker is away: one trial at a time, and waits that spread."""

import asyncio

import pytest

from outbox.events import Event
from relay.breaker import Breaker
from relay.events import BrokerLost, BrokerRecovered


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long a breaker would have waited; here it does not wait at all."""
    waited: list[float] = []

    async def note(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr("relay.breaker.asyncio.sleep", note)
    return waited


class Heard:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.breaker = Breaker(self.events.append)

    def delays(self) -> list[float]:
        return [e.seconds for e in self.events if isinstance(e, BrokerLost)]


async def test_a_closed_breaker_admits_everything(waits: list[float]) -> None:
    heard = Heard()

    async with heard.breaker.admit(), heard.breaker.admit():
        pass

    heard.breaker.close()
    assert (waits, heard.events) == ([], [])


async def test_an_open_breaker_makes_the_next_batch_wait(waits: list[float]) -> None:
    heard = Heard()
    heard.breaker.open("gone")

    async with heard.breaker.admit():
        pass

    assert waits == heard.delays()
    assert heard.events == [BrokerLost(reason="gone", seconds=waits[0])]


async def test_one_batch_tries_and_the_others_wait_for_its_outcome(
    waits: list[float],
) -> None:
    heard = Heard()
    heard.breaker.open("gone")
    order: list[str] = []

    async def try_it(name: str) -> None:
        async with heard.breaker.admit():
            order.append(f"{name} in")
            # The other would come in here if it could.
            await asyncio.get_running_loop().run_in_executor(None, int)
            heard.breaker.close()
            order.append(f"{name} out")

    await asyncio.gather(try_it("a"), try_it("b"))

    assert order == ["a in", "a out", "b in", "b out"]
    assert len(waits) == 1
    assert isinstance(heard.events[-1], BrokerRecovered)


async def test_a_failed_trial_makes_the_next_one_wait_again(
    waits: list[float],
) -> None:
    heard = Heard()
    heard.breaker.open("gone")

    for _ in range(3):
        async with heard.breaker.admit():
            heard.breaker.open("still gone")

    assert waits == heard.delays()[:3]


async def test_a_trial_without_messages_costs_no_second_wait(
    waits: list[float],
) -> None:
    heard = Heard()
    heard.breaker.open("gone")

    for _ in range(3):
        async with heard.breaker.admit():
            pass

    assert len(waits) == 1


async def test_the_return_of_the_broker_is_reported_once(waits: list[float]) -> None:
    heard = Heard()
    heard.breaker.open("gone")

    heard.breaker.close()
    heard.breaker.close()

    assert [type(event) for event in heard.events] == [BrokerLost, BrokerRecovered]
    async with heard.breaker.admit():
        pass
    assert waits == []


def test_the_waits_grow_to_a_cap_and_start_over_after_success() -> None:
    heard = Heard()

    for _ in range(500):
        heard.breaker.open("gone")

    delays = heard.delays()
    assert all(0.2 <= delay <= 15 for delay in delays)
    assert delays[0] <= 0.6
    assert max(delays) > 10
    heard.breaker.close()
    heard.breaker.open("gone")
    assert heard.delays()[-1] <= 0.6
