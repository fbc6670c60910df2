"""Consumers are killed at random moments, over each broker."""

import random
from collections.abc import Iterator

import pytest

from tests.acceptance.brokers import BROKERS, Broker, plainly
from tests.acceptance.counters import COUNTER, POOLED, Counters
from tests.acceptance.fixtures import Figures
from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import Relays
from tests.acceptance.writer import Writer
from tests.fixtures.waiting import let_pass, wait_until_none

pytestmark = pytest.mark.fault


@pytest.fixture(params=plainly("redis", "nats"))
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    with BROKERS[request.param]() as running:
        yield running


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("consumer", [COUNTER, POOLED], ids=["sessions", "pool"])
def test_every_message_takes_effect_once_when_consumers_are_killed(
    broker: Broker,
    consumer: str,
    relays: Relays,
    counters: Counters,
    writer: Writer,
    inspection: Inspection,
    full: bool,
    figures: Figures,
) -> None:
    kills, count = (30, 667) if full else (2, 100)
    handling = [counters.start(broker.url, consumer) for _ in range(2)]
    relays.start(broker.url)
    for _ in range(kills):
        before = counters.count()
        writer.add(count)
        counters.wait_for_count(before + 1)
        let_pass(random.uniform(0, 0.3))
        random.shuffle(handling)
        handling.pop().kill()
        handling.append(counters.start(broker.url, consumer))
    counters.wait_for_count(writer.added)
    inspection.wait_until_settled()
    wait_until_none("deliveries wait", broker.waiting)

    numbers = counters.numbers()
    if not broker.ordered:
        numbers = {key: sorted(of_key) for key, of_key in numbers.items()}
    assert numbers == writer.numbers()
    assert counters.receipts() == writer.added
    assert counters.dead_letters() == 0
    figures("kills, messages", (kills, writer.added))
    figures("duplicates skipped", sum(counters.logged("DuplicateSkipped")))
