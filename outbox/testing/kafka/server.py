"""A Kafka for tests and for trying out: the mock cluster that is part of librdkafka.

It speaks Kafka's protocol over TCP from a process of its own and keeps everything in
memory, at most 5 MB of each Kafka partition. `docs/brokers/kafka.md` lists what it
doesn't do as Kafka does.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from outbox.errors import OutboxError

__all__ = ["COMMIT", "PRODUCE", "KafkaCluster", "kafka_cluster"]

PRODUCE: Final = 0
"""The number of Kafka's request that brings messages, for `refuse`."""
COMMIT: Final = 8
"""The number of the one that commits offsets."""

_ALL: Final = -1


class KafkaCluster:
    """One cluster of brokers on ports of 127.0.0.1.

    Topics come into being when they are asked for, with 4 Kafka partitions.
    """

    def __init__(self, brokers: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "outbox.testing.kafka.cluster", str(brokers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Control-C in the terminal is for us, and our end is the end of its input.
            start_new_session=True,
        )
        self.servers = self._read().split(",")
        """`host:port` of each broker; the ids of brokers count from 1."""
        self._call("group_initial_rebalance_delay_ms", 0)

    @property
    def url(self) -> str:
        """Where it is."""
        return f"kafka://{','.join(self.servers)}"

    @property
    def pid(self) -> int:
        """The process, to be stopped and continued."""
        return self._process.pid

    def stop(self) -> None:
        """Break all connections and let nobody in; the logs are kept, as on a disk."""
        self._call("broker_set_down", _ALL)

    def start(self) -> None:
        """Be there again after `stop`."""
        self._call("broker_set_up", _ALL)

    def freeze(self) -> None:
        """Answer nothing more, with connections open."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Go on after `freeze`."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it for good, with everything that was in it."""
        self._process.kill()
        self._process.communicate()

    def create_topic(self, topic: str, *, partitions: int) -> None:
        """Make a topic with a number of Kafka partitions of choice."""
        self._call("topic_create", topic, partitions, 1)

    def fail_topic(self, topic: str, error: int) -> None:
        """Have everybody told this error of Kafka's for a topic; 0 ends it."""
        self._call("topic_set_error", topic, error)

    def refuse(self, request: int, *errors: int) -> None:
        """Have the next requests of a kind fail, one after the other."""
        self._call("push_request_errors", request, len(errors), *errors)

    def lead(self, topic: str, partition: int, broker: int) -> None:
        """Make a broker the leader of a Kafka partition."""
        self._call("partition_set_leader", topic, partition, broker)

    def advertise(self, broker: int, host: str, port: int) -> None:
        """Have clients told another address of a broker, of a proxy before it."""
        self._call("broker_set_host_port", broker, host, port)

    def _call(self, name: str, *arguments: int | str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps([name, *arguments])}\n")
        self._process.stdin.flush()
        self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise OutboxError(
                f"the mock cluster ended with status {self._process.wait()}"
            )
        return line.strip()


@contextmanager
def kafka_cluster(brokers: int = 3) -> Iterator[KafkaCluster]:
    """Yield a running cluster that is gone after the block, or with this process."""
    cluster = KafkaCluster(brokers)
    try:
        yield cluster
    finally:
        cluster.kill()
