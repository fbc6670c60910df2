"""Kafka for tests and demonstrations: the mock cluster that is part of librdkafka.

It runs in a separate process, speaks Kafka's protocol over TCP, and keeps everything in
memory, at most 5 MB of each Kafka partition. `docs/brokers/kafka.md` lists how it
differs from Kafka.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pillarbox.outbox.errors import OutboxError

__all__ = ["COMMIT", "PRODUCE", "KafkaCluster", "kafka_cluster"]

PRODUCE: Final = 0
"""The number of Kafka's Produce request, for `refuse`."""
COMMIT: Final = 8
"""The number of Kafka's OffsetCommit request, for `refuse`."""

_ALL: Final = -1
_PROGRAM: Final = Path(__file__).with_name("cluster.py")


class KafkaCluster:
    """One cluster of brokers on ports of 127.0.0.1.

    Topics are created when a client asks for them, with 4 Kafka partitions.
    """

    def __init__(self, brokers: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(_PROGRAM), str(brokers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Control-C in the terminal must reach only this process: when it ends, so
            # does the cluster's input.
            start_new_session=True,
        )
        self.servers = self._read().split(",")
        """`host:port` of each broker; the ids of brokers start at 1."""
        self._call("group_initial_rebalance_delay_ms", 0)

    @property
    def url(self) -> str:
        """The URL of the cluster."""
        return f"kafka://{','.join(self.servers)}"

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def stop(self, broker: int = _ALL) -> None:
        """Break all connections and refuse new ones; the logs are kept."""
        self._call("broker_set_down", broker)

    def start(self, broker: int = _ALL) -> None:
        """Accept connections again after `stop`."""
        self._call("broker_set_up", broker)

    def freeze(self) -> None:
        """Stop responding, but keep connections open."""
        self._process.send_signal(signal.SIGSTOP)
        # The cluster can still answer until all of its threads have stopped.
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        """Respond again after `freeze`."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the cluster, and lose everything in it."""
        self._process.kill()
        self._process.communicate()

    def create_topic(self, topic: str, *, partitions: int) -> None:
        """Create a topic with this number of Kafka partitions."""
        self._call("topic_create", topic, partitions, 1)

    def delete_topic(self, topic: str) -> None:
        """Delete a topic."""
        self._call("topic_delete", topic)

    def fail_topic(self, topic: str, error: int) -> None:
        """Answer every request for a topic with this Kafka error; 0 turns that off."""
        self._call("topic_set_error", topic, error)

    def refuse(self, request: int, *errors: int) -> None:
        """Make the next requests of a kind fail, each with one of these errors."""
        self._call("push_request_errors", request, len(errors), *errors)

    def lead(self, topic: str, partition: int, broker: int) -> None:
        """Make a broker the leader of a Kafka partition; -1 for none."""
        self._call("partition_set_leader", topic, partition, broker)

    def advertise(self, broker: int, host: str, port: int) -> None:
        """Advertise another address for a broker to clients, such as a proxy's."""
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
                f"the mock cluster exited with status {self._process.wait()}"
            )
        return line.strip()


@contextmanager
def kafka_cluster(brokers: int = 3) -> Iterator[KafkaCluster]:
    """Yield a running cluster; stop it after the block, or when this process ends."""
    cluster = KafkaCluster(brokers)
    try:
        yield cluster
    finally:
        cluster.kill()
