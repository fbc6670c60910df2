"""The process behind `tests.servers.kafka`: librdkafka's mock cluster.

Each line of its standard input is a JSON list: the name of a function of
`rdkafka_mock.h`, without its prefix, and the arguments that follow the cluster. It
answers each with a line that contains the function's result. The first line of output
contains the addresses of the brokers. The process ends when its input does.
"""

import ctypes
import json
import sys
from pathlib import Path
from typing import Any, Final

import confluent_kafka

__all__: list[str] = []

_PRODUCER: Final = 0
_ROOM: Final = 512


def library() -> ctypes.CDLL:
    """Load the librdkafka that the client uses; it contains the mock."""
    assert confluent_kafka.libversion()
    lines = Path("/proc/self/maps").read_text().splitlines()
    (path,) = {line.split(maxsplit=5)[5] for line in lines if "/librdkafka" in line}
    return ctypes.CDLL(path)


class Cluster:
    """A mock cluster, whose functions are called by name."""

    def __init__(self, kafka: ctypes.CDLL, brokers: int) -> None:
        self._kafka = kafka
        for name in ("conf_new", "new", "mock_cluster_new"):
            self._function(name).restype = ctypes.c_void_p
        reason = ctypes.create_string_buffer(_ROOM)
        conf = ctypes.c_void_p(self._function("conf_new")())
        self._function("conf_set")(conf, b"log_level", b"0", reason, _ROOM)
        client = self._function("new")(_PRODUCER, conf, reason, _ROOM)
        if not client:
            raise RuntimeError(reason.value.decode())
        made = self._function("mock_cluster_new")(ctypes.c_void_p(client), brokers)
        self._cluster = ctypes.c_void_p(made)

    def bootstraps(self) -> str:
        """Return the addresses of the brokers."""
        function = self._function("mock_cluster_bootstraps")
        function.restype = ctypes.c_char_p
        found: bytes = function(self._cluster)
        return found.decode()

    def call(self, name: str, *arguments: int | str) -> int:
        """Call a function of `rdkafka_mock.h` and return its result."""
        given = [
            ctypes.c_char_p(each.encode())
            if isinstance(each, str)
            else ctypes.c_int(each)
            for each in arguments
        ]
        returned: int = self._function(f"mock_{name}")(self._cluster, *given)
        return returned

    def _function(self, name: str) -> Any:
        return getattr(self._kafka, f"rd_kafka_{name}")


def serve(brokers: int) -> None:
    """Run a cluster and execute commands until the input ends."""
    cluster = Cluster(library(), brokers)
    sys.stdout.write(f"{cluster.bootstraps()}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        sys.stdout.write(f"{cluster.call(name, *arguments)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
