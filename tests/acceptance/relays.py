"""Relay processes on one database."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from tests.fixtures.processes import ROOT, RunningProcess, pillarbox_line

_ENTRY_POINT = (
    "[relay.publishers]\nsink = tests.acceptance.sink:SinkPublisher.from_url\n"
)


def as_role(url: str, role: str) -> str:
    """Return the URL for a connection with the privileges of one role only."""
    separator = "&" if "?" in url else "?"
    return f"{url}{separator}options=-c%20role%3D{role}"


class Relays:
    """Starts relays with a relay's privileges, and kills them on exit."""

    def __init__(self, url: str, directory: Path) -> None:
        self._url = as_role(url, "pillarbox_relay")
        self._directory = directory
        self._numbers = itertools.count(1)
        self._started: list[RunningProcess] = []
        # Look like an installed distribution that provides the sink's publisher.
        installed = directory / "installed" / "sink-1.dist-info"
        installed.mkdir(parents=True)
        (installed / "METADATA").write_text("Name: sink\nVersion: 1\n")
        (installed / "entry_points.txt").write_text(_ENTRY_POINT)
        self._environment = {"PYTHONPATH": f"{installed.parent}:{ROOT}"}

    def start(self, broker: str, *options: str, **variables: str) -> RunningProcess:
        """Start another relay, and return once it has reached database and broker."""
        relay = self.start_without_waiting(broker, *options, **variables)
        relay.wait_for_log("RelayStarted")
        return relay

    def start_without_waiting(
        self, broker: str, *options: str, **variables: str
    ) -> RunningProcess:
        """Start another relay, without checking that it starts."""
        return self.command("relay", broker=broker, options=options, **variables)

    def command(
        self, *words: str, broker: str, options: Sequence[str] = (), **variables: str
    ) -> RunningProcess:
        """Start a command on the same database."""
        ours = (f"--database={self._url}", f"--broker={broker}")
        # If an option is given twice, the last one counts.
        line = pillarbox_line(variables, *words, *ours, *options)
        log = self._directory / f"relay-{next(self._numbers)}.log"
        relay = RunningProcess(line, log, {**self._environment, **variables})
        self._started.append(relay)
        return relay

    def __iter__(self) -> Iterator[RunningProcess]:
        return iter(self._started)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for relay in self._started:
            with suppress(ProcessLookupError):
                relay.kill()
