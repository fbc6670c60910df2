"""Relay processes on one database."""

from collections.abc import Sequence
from pathlib import Path

from tests.fixtures.processes import (
    ROOT,
    Processes,
    RunningProcess,
    pillarbox_line,
)

_ENTRY_POINT = (
    "[pillarbox.publishers]\nsink = tests.acceptance.sink:SinkPublisher.from_url\n"
)


def as_role(url: str, role: str) -> str:
    """Return the URL for a connection with the privileges of one role only."""
    separator = "&" if "?" in url else "?"
    return f"{url}{separator}options=-c%20role%3D{role}"


class Relays(Processes):
    """Starts relays with a relay's privileges, and kills them on exit."""

    def __init__(self, url: str, directory: Path) -> None:
        self._url = as_role(url, "pillarbox_relay")
        # Look like an installed distribution that provides the sink's publisher.
        installed = directory / "installed" / "sink-1.dist-info"
        installed.mkdir(parents=True)
        (installed / "METADATA").write_text("Name: sink\nVersion: 1\n")
        (installed / "entry_points.txt").write_text(_ENTRY_POINT)
        super().__init__(directory, "relay", PYTHONPATH=f"{installed.parent}:{ROOT}")

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
        return self.begin(
            pillarbox_line(variables, *words, *ours, *options), **variables
        )
