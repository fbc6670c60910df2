"""PostgreSQL and each broker are restarted under running consumers."""

import random
from collections.abc import Callable
from functools import partial
from typing import Final

import psycopg
import pytest

from outbox.testing.postgres import PostgresServer, StopMode
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
                wait_for("they work", partial(counters.are_at_work, alone=broker.alone))
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


def expect_each_once(
    counters: Counters, writer: Writer, waiting: Callable[[], int], *, ordered: bool
) -> None:
    """Wait until every message is acked; check that each took effect once."""
    counters.wait_for_count(writer.added)
    wait_until_none("deliveries wait", waiting)
    counters.expect_each_once(writer.numbers(), ordered=ordered)
    assert all(counter.is_running() for counter in counters)
