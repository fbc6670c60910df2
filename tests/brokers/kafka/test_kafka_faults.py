"""The fault suite with Kafka: with the mock, as far as it can fail, and a real node."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import pytest
from confluent_kafka import KafkaError
from typing_extensions import override

from tests.acceptance.broker_faults import (
    CONCURRENCY,
    IN_FLIGHT,
    LONGEST_WAIT,
    TO_BE_CUT,
    TOPIC,
    Arrival,
    BrokerFaults,
    announced_waits,
    by_first_appearance,
)
from tests.fixtures.kafka import Kafka, behind, messages
from tests.fixtures.processes import RunningProcess
from tests.fixtures.real_kafka import real_kafka
from tests.fixtures.waiting import wait_for
from tests.servers.kafka import PRODUCE, KafkaCluster, kafka_cluster

pytestmark = pytest.mark.fault


class KafkaFaults(BrokerFaults):
    # A producer needs up to a second to get its id for idempotence.
    publish_timeout = 8.0

    @pytest.fixture(autouse=True)
    def broker(self, parts: None) -> Iterator[None]:
        make_proxy = self.make_proxy
        self.make_proxy = lambda _: behind(make_proxy, self.server)
        with self.running() as self.server:
            self.server.create_topic(TOPIC, partitions=4)
            yield

    @abstractmethod
    def running(self) -> AbstractContextManager[Kafka]:
        """Run a Kafka with one broker."""

    @override
    def broker_url(self) -> str:
        return self.server.url

    @override
    def arrivals(self) -> Sequence[Arrival]:
        return [
            (str(message.id), message.key or "", int(message.payload))
            for message in messages(self.server.url, TOPIC, self.writer.added)
        ]

    @override
    def kill(self) -> None:
        self.server.stop()

    @override
    def start(self) -> None:
        self.server.start()

    @pytest.mark.timeout(900)
    @override
    def test_connection_cut_in_mid_batch(self) -> None:
        relay = self.drain()
        for cut in (1, 3, 5):
            self.proxy.stall()
            self.writer.add(TO_BE_CUT)
            left = self.inspection.unsettled()
            connections = range(self.proxy.connections + 1)
            self.proxy.cut_after(1_000 * cut)
            self.proxy.resume()
            self.wait_for_another(connections)
            self.wait_for_progress(left)
        self.expect_uncharged(relay, times=3)

    @pytest.mark.timeout(900)
    @override
    def test_stall_longer_than_the_publish_timeout(self) -> None:
        relay = self.drain(f"--publish-timeout={self.publish_timeout}s")
        lost = relay.log().count("BrokerLost")
        self.proxy.stall()
        self.writer.add(TO_BE_CUT)
        relay.wait_for_log("BrokerLost", times=lost + 2)
        assert self.inspection.unsettled()
        assert self.inspection.charged() == 0
        self.proxy.resume()
        self.expect_all(relay)

    def wait_for_another(self, connections: range) -> None:
        """Wait until the proxy has had a connection beyond these."""
        wait_for("it was cut", lambda: self.proxy.connections not in connections)

    def expect_uncharged(self, relay: RunningProcess, *, times: int) -> None:
        """Wait until all messages are settled, and check that no attempt was charged.

        A fault loses at most the batches in flight, and no trial after it.

        The messages in flight at each of the `times` faults can arrive twice: the mock
        appends again whatever an idempotent producer sends again.
        """
        self.proxy.slow(0)
        self.inspection.wait_until_settled()
        arrivals = self.arrivals()
        assert by_first_appearance(arrivals) == self.writer.numbers()
        assert len(arrivals) <= self.writer.added + times * IN_FLIGHT
        assert self.inspection.charged() == 0
        waits = announced_waits(relay)
        assert len(waits) <= times * CONCURRENCY
        assert max(waits, default=0.0) <= LONGEST_WAIT


class TestKafka(KafkaFaults):
    @override
    def running(self) -> AbstractContextManager[Kafka]:
        return kafka_cluster(brokers=1)

    @pytest.mark.timeout(900)
    def test_a_broker_that_accepts_nothing_for_a_while_costs_no_attempt(
        self,
    ) -> None:
        relay = self.drain()
        passing = (
            KafkaError.NOT_ENOUGH_REPLICAS,
            KafkaError.NOT_LEADER_FOR_PARTITION,
            KafkaError.REQUEST_TIMED_OUT,
            KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
            # A broker's disk is full or broken.
            KafkaError.KAFKA_STORAGE_ERROR,
        )
        assert isinstance(self.server, KafkaCluster)
        self.server.refuse(PRODUCE, *passing * 3)
        self.writer.add(TO_BE_CUT)
        self.expect_uncharged(relay, times=3 * len(passing))


@pytest.mark.variant
class TestRealKafka(KafkaFaults):
    @override
    def running(self) -> AbstractContextManager[Kafka]:
        return real_kafka()
