"""Relays that are killed at random moments."""

import random

import pytest

from tests.acceptance.fixtures import Figures
from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import Relays
from tests.acceptance.sink import Sink
from tests.acceptance.writer import Writer
from tests.fixtures.waiting import let_pass, wait_for

pytestmark = pytest.mark.fault

BATCH_SIZE = 20
CONCURRENCY = 2
# More messages than two relays publish to a slow sink before a kill.
ENOUGH = 500
OPTIONS = (
    f"--batch-size={BATCH_SIZE}",
    f"--concurrency={CONCURRENCY}",
    "--lease=2s",
)


@pytest.mark.timeout(900)
def test_relays_killed_at_random_lose_nothing_and_keep_each_key_in_order(
    relays: Relays,
    slow_sink: Sink,
    writer: Writer,
    inspection: Inspection,
    full: bool,
    figures: Figures,
) -> None:
    kills, messages = (30, 12_500) if full else (4, 1_000)
    writer.add(messages)
    running = [relays.start(slow_sink.url, *OPTIONS) for _ in range(2)]
    for _ in range(kills):
        random.shuffle(running)
        victim = running.pop()

        def published(pid: int = victim.pid) -> int:
            # So that there is work left for it, however long its start takes.
            if inspection.unsettled() < ENOUGH:
                writer.add(ENOUGH)
            return slow_sink.count_of(pid)

        wait_for("the next victim publishes", published)
        let_pass(random.uniform(0, 0.3))
        assert inspection.unsettled(), "drained before the kills were over"
        victim.kill()
        running.append(relays.start(slow_sink.url, *OPTIONS))
    inspection.wait_until_settled()

    assert slow_sink.numbers() == writer.numbers()
    assert slow_sink.duplicates() <= kills * CONCURRENCY * BATCH_SIZE
    assert inspection.charged() == 0
    figures("duplicates", f"{slow_sink.duplicates()} after {kills} kills")
