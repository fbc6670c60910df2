"""PostgreSQL and each broker are restarted under running consumers."""

import random
from collections.abc import Callable
from functools import partial
from typing import Final

import psycopg
import pytest

from pillarbox.outbox.testing.postgres import PostgresServer, StopMode
from tests.acceptance.broker_faults import LONGEST_WAIT, MANY_TRIALS, announced_waits
from tests.acceptance.brokers import Broker, outbox, plainly
from tests.acceptance.counters import Counters
from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import Relays
from tests.acceptance.writer import Writer
from tests.fixtures.waiting import let_pass, wait_for, wait_until_none

pytestmark = [pytest.mark.fault, pytest.mark.timeout(3600)]

_MODES: Final[tuple[StopMode, ...]] = ("fast", "immediate")


@pytest.fixture
def rounds(full: bool) -> int:
    return 8 if full else 1


@pytest.fixture
def count(full: bool) -> int:
    """Return how many messages to add in each round."""
    return 2_500 if full else 100


@pytest.mark.parametrize("kind", plainly("rabbitmq"))
class TestABroker:
    @pytest.mark.long
    def test_killed_while_handlers_run_and_at_random_moments(
        self,
        broker: Broker,
        relays: Relays,
        counters: Counters,
        writer: Writer,
        inspection: Inspection,
        rounds: int,
        count: int,
    ) -> None:
        for _ in range(2):
            counters.start(broker.url)
        broker.write()
        relays.start(broker.url)
        for _ in range(rounds):
            with psycopg.connect(inspection.url) as gate:
                # Handlers wait at their INSERT until the block ends.
                gate.execute("LOCK TABLE counted IN EXCLUSIVE MODE")
                writer.add(count)
                at_work = 2 if broker.shares else 1
                wait_for("they work", partial(counters.are_at_work, at_work))
                logged = (
                    counters.logged("SourceLost"),
                    counters.logged("SourceRecovered"),
                )
                broker.kill()
            # Handlers finish without the broker, and their acks have to wait.
            wait_for(
                "it is missed",
                partial(counters.all_have_logged, "SourceLost", logged[0]),
            )
            broker.start()
            wait_for(
                "it is found",
                partial(counters.all_have_logged, "SourceRecovered", logged[1]),
            )
        expect_each_once(counters, writer, broker.waiting, ordered=broker.ordered)
        for _ in range(rounds):
            before = counters.count()
            writer.add(count)
            counters.wait_for_count(before + 1)
            let_pass(random.uniform(0, 0.3))
            broker.kill()
            let_pass(random.uniform(0, 0.3))
            broker.start()
        expect_each_once(counters, writer, broker.waiting, ordered=broker.ordered)

    def test_relay_and_consumer_ask_every_second_whether_it_is_back(
        self, broker: Broker, relays: Relays, counters: Counters, writer: Writer
    ) -> None:
        counter = counters.start(broker.url)
        broker.write()
        relay = relays.start(broker.url, "--log-level=debug")
        writer.add(10)
        counters.wait_for_count(10)
        broker.kill()
        writer.add(10)
        relay.wait_for_log("BrokerLost", times=MANY_TRIALS)
        counter.wait_for_log("SourceLost", times=MANY_TRIALS)
        broker.start()
        counters.wait_for_count(20)
        assert max(announced_waits(relay)) <= LONGEST_WAIT
        assert max(announced_waits(counter, "SourceLost")) <= LONGEST_WAIT


class TestPostgreSQL:
    @pytest.fixture
    def database_url(self, private_database_url: str) -> str:
        """Replace the database on the shared server."""
        return private_database_url

    def test_restarted_as_database_and_broker(
        self,
        migrated_server: PostgresServer,
        counters: Counters,
        writer: Writer,
        inspection: Inspection,
        rounds: int,
        count: int,
    ) -> None:
        broker = outbox(inspection.url)
        for _ in range(2):
            counters.start(broker.url)
        for mode in rounds * _MODES:
            before = counters.count()
            writer.add(count)
            counters.wait_for_count(before + 1)
            let_pass(random.uniform(0, 0.3))
            migrated_server.restart(mode)
            writer.reconnect()
        expect_each_once(counters, writer, broker.waiting, ordered=True)

    def test_is_asked_every_second_whether_it_is_back(
        self,
        migrated_server: PostgresServer,
        counters: Counters,
        writer: Writer,
        inspection: Inspection,
    ) -> None:
        counter = counters.start(outbox(inspection.url).url)
        migrated_server.stop("immediate")
        counter.wait_for_log("SourceLost", times=MANY_TRIALS)
        migrated_server.start()
        writer.add(10)
        counters.wait_for_count(10)
        assert max(announced_waits(counter, "SourceLost")) <= LONGEST_WAIT


def expect_each_once(
    counters: Counters, writer: Writer, waiting: Callable[[], int], *, ordered: bool
) -> None:
    """Wait until every message is acked; check that each took effect once."""
    counters.wait_for_count(writer.added)
    wait_until_none("deliveries wait", waiting)
    counters.expect_each_once(writer.numbers(), ordered=ordered)
    assert all(counter.is_running() for counter in counters)
