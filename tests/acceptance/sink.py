"""A broker that tests can count in: a file to which relays append their messages.

A batch is one write in append mode, so it survives its process and is never mixed
with another batch. Its acks follow after `latency`, during which a relay can be killed
with the batch in flight.
"""

import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self
from urllib.parse import parse_qs, urlsplit

from pillarbox.outbox.message import Message
from pillarbox.relay.publisher import Acked, Confirmation
from tests.fixtures.waiting import answer_after, wait_for

_LINE: Final = re.compile(r"(\d+) ([\d.]+) (\S+) (\S+) (\d+);")


class SinkPublisher:
    """A third-party publisher for `sink:///path?latency=SECONDS`."""

    def __init__(self, path: Path, latency: float) -> None:
        self._path = path
        self._latency = latency
        self._file = -1

    @classmethod
    def from_url(cls, url: str) -> Self:
        parts = urlsplit(url)
        options = parse_qs(parts.query)
        return cls(Path(parts.path), float(options.get("latency", ["0"])[0]))

    async def __aenter__(self) -> Self:
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        os.close(self._file)

    async def publish(self, batch: Sequence[Message]) -> Sequence[Confirmation]:
        # Begin with a newline, to end a line that a killed writer left unfinished.
        lines = [""]
        start = f"{os.getpid()} {time.monotonic()}"
        lines += [f"{start} {m.id} {m.key} {m.payload.decode()};" for m in batch]
        data = "\n".join([*lines, ""]).encode()
        assert os.write(self._file, data) == len(data)
        await answer_after(self._latency)
        return [Acked()] * len(batch)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message as it reached the sink."""

    pid: int
    at: float
    id: str
    key: str
    number: int


class Sink:
    """The messages that have arrived, in order of arrival."""

    def __init__(self, path: Path, *, latency: float = 0.0) -> None:
        self._path = path
        self.url = self.url_with(latency=latency)
        self._read_up_to = 0
        self._rest = ""
        self._arrivals: list[Arrival] = []
        self._ids: set[str] = set()
        self._by_pid: Counter[int] = Counter()

    def url_with(self, *, latency: float) -> str:
        """Return the URL for this latency."""
        return f"sink://{self._path}?latency={latency}"

    def arrivals(self) -> list[Arrival]:
        """Return all arrivals, including duplicates."""
        if self._path.exists():
            with self._path.open() as file:
                file.seek(self._read_up_to)
                *lines, self._rest = (self._rest + file.read()).split("\n")
                self._read_up_to = file.tell()
            for line in lines:
                if (match := _LINE.fullmatch(line)) is not None:
                    pid, at, id, key, number = match.groups()
                    arrival = Arrival(int(pid), float(at), id, key, int(number))
                    self._arrivals.append(arrival)
                    self._ids.add(id)
                    self._by_pid[arrival.pid] += 1
        return self._arrivals

    def count(self) -> int:
        """Return the number of messages, excluding duplicates."""
        self.arrivals()
        return len(self._ids)

    def count_of(self, pid: int) -> int:
        """Return how many messages one relay has published, including duplicates."""
        self.arrivals()
        return self._by_pid[pid]

    def wait_for_count(self, count: int) -> None:
        """Wait until `count` different messages have arrived."""
        wait_for(f"{count} messages arrive", lambda: self.count() >= count)

    def wait_for_relay(self, pid: int) -> None:
        """Wait until a relay has published a message."""
        wait_for(f"relay {pid} publishes", lambda: self.count_of(pid))

    def duplicates(self) -> int:
        """Return how many arrivals were not the first of their message."""
        return len(self.arrivals()) - self.count()

    def numbers(self) -> dict[str, list[int]]:
        """Return the numbers of each key's messages, in order of first appearance."""
        first = {arrival.id: arrival for arrival in reversed(self.arrivals())}
        numbers: dict[str, list[int]] = defaultdict(list)
        for arrival in self.arrivals():
            if first.get(arrival.id) is arrival:
                numbers[arrival.key].append(arrival.number)
        return dict(numbers)
