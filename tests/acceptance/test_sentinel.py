"""Redis with Sentinels: the master is killed, or frozen, while messages flow."""

from collections.abc import Iterator

import pytest
from redis import Redis

from tests.acceptance.counter import TOPIC
from tests.acceptance.counters import Counters
from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import Relays
from tests.acceptance.writer import Writer
from tests.fixtures.waiting import wait_for
from tests.servers.redis import RedisGroup, redis_group

pytestmark = [pytest.mark.fault, pytest.mark.timeout(900)]


@pytest.fixture
def group() -> Iterator[RedisGroup]:
    with redis_group(appendonly="yes") as running:
        yield running


class TestAFailover:
    @pytest.fixture(autouse=True)
    def parts(
        self,
        group: RedisGroup,
        relays: Relays,
        counters: Counters,
        writer: Writer,
        inspection: Inspection,
    ) -> None:
        self.group = group
        self.relays = relays
        self.counters = counters
        self.writer = writer
        self.inspection = inspection

    @pytest.mark.long
    def test_of_a_killed_master_loses_nothing_that_a_replica_must_have(self) -> None:
        self.begin_with_traffic()
        self.group.master.kill()
        self.writer.add(500)
        self.group.wait_until_promoted()
        self.expect_each_once()

    @pytest.mark.long
    def test_of_a_frozen_master_loses_nothing_although_it_comes_back(self) -> None:
        self.begin_with_traffic()
        self.group.master.freeze()
        self.writer.add(500)
        self.group.wait_until_promoted()
        self.group.master.thaw()
        # Until Sentinel makes it a replica, it believes that it is the master.
        self.writer.add(500)
        with Redis.from_url(self.group.master.url) as client:
            wait_for("its new role", lambda: client.role()[0] == b"slave")
        self.writer.add(500)
        self.expect_each_once()

    @pytest.mark.parametrize(("option", "lost"), [("", 10), ("?replicas=1", 0)])
    def test_loses_only_what_no_replica_has_and_nothing_if_one_must(
        self, option: str, lost: int
    ) -> None:
        relay = self.relays.start(self.group.url + option, "--log-level=debug")
        self.publish(10)
        with Redis.from_url(self.group.replica.url) as client:
            wait_for("replication", lambda: client.xlen(TOPIC) == 10)
        self.group.replica.kill()
        self.writer.add(10)
        if lost:
            self.inspection.wait_until_settled()
        else:
            relay.wait_for_log("0 of 1 replicas have the batch")
        self.group.master.kill()
        self.group.replica.start()
        self.group.wait_until_promoted()
        # The other one is gone, so that no replica could have more.
        self.counters.start(self.group.url)
        self.counters.wait_for_count(20 - lost)
        handled = self.counters.numbers()
        assert sum(map(len, handled.values())) == 20 - lost

    def begin_with_traffic(self) -> None:
        """Start three consumers and a relay, and return while they are at work."""
        for _ in range(3):
            self.counters.start(self.group.url)
        self.relays.start(f"{self.group.url}?replicas=1")
        self.writer.add(500)
        self.counters.wait_for_count(50)

    def publish(self, count: int) -> None:
        """Add messages, and wait until the relay has published them."""
        self.writer.add(count)
        self.inspection.wait_until_settled()

    def expect_each_once(self) -> None:
        """Wait until all are handled; check that each took effect once, in order."""
        self.writer.add(100)
        self.counters.wait_for_count(self.writer.added)
        self.counters.expect_each_once(self.writer.numbers())
        assert self.inspection.charged() == 0
