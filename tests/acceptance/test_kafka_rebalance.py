"""Three replicas on a real Kafka are killed and frozen, in both group protocols."""

import random
from itertools import chain

import pytest

from tests.acceptance.brokers import QUICK, kafka
from tests.acceptance.counters import IMPATIENT, Counters
from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import Relays
from tests.acceptance.writer import Writer
from tests.fixtures.waiting import let_pass, wait_until_none

pytestmark = [pytest.mark.fault, pytest.mark.variant, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("options", [QUICK, "group.protocol=consumer"])
def test_every_message_takes_effect_once_and_in_order(
    options: str,
    relays: Relays,
    counters: Counters,
    writer: Writer,
    inspection: Inspection,
    full: bool,
) -> None:
    rounds = 5 if full else 1
    with kafka() as broker:
        url = f"{broker.url.partition('?')[0]}?{options}"
        handling = [counters.start(url, IMPATIENT) for _ in range(3)]
        relays.start(broker.url)
        for frozen in chain.from_iterable([(False, True)] * rounds):
            before = counters.count()
            writer.add(500)
            counters.wait_for_count(before + 1)
            let_pass(random.uniform(0, 0.3))
            random.shuffle(handling)
            if frozen:
                # The others take over what it had, and it finds out when it goes on.
                handling[0].freeze()
                counters.wait_for_count(writer.added)
                handling[0].thaw()
            else:
                handling.pop().kill()
                handling.append(counters.start(url, IMPATIENT))
        counters.wait_for_count(writer.added)
        inspection.wait_until_settled()
        wait_until_none("records wait", broker.waiting)
    counters.expect_each_once(writer.numbers())
