"""Broker faults under a running relay: a test suite that each broker subclasses.

Whatever happens to the broker, no message is lost, keys keep their order by first
appearance, no attempt is charged, and the relay resumes with its next trial.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeAlias

import pytest

from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import Relays
from tests.acceptance.writer import Writer
from tests.fixtures.processes import RunningProcess
from tests.fixtures.proxy import MakeProxy
from tests.fixtures.waiting import wait_for

TOPIC = "numbers.counted"
_BATCH = 50
CONCURRENCY = 2
IN_FLIGHT = _BATCH * CONCURRENCY
# The messages added before a cut: more bytes than any cut lets through.
TO_BE_CUT = 200
# Not a guarantee: recovery is guaranteed in trials and the waits between them.
_RECOVERY = 90.0
# However long the broker was away.
LONGEST_WAIT = 1.0
MANY_TRIALS = 12
# A trial already under way can still fail after the broker is back.
_FAILED_TRIALS = 1

Arrival: TypeAlias = tuple[str, str, int]
# Excludes the lines that summarize several events.
_WAIT = re.compile(r"\bseconds=([0-9.]+)$")


def announced_waits(process: RunningProcess, event: str = "BrokerLost") -> list[float]:
    """Return the announced wait for the next trial, for each loss of a server."""
    # The last line may be incomplete.
    log = process.log().rpartition("\n")[0]
    lines = [line for line in log.splitlines() if f" {event} " in line]
    found = [_WAIT.search(line) for line in lines if " repeated=" not in line]
    waits = [float(wait[1]) for wait in found if wait]
    assert len(waits) == len(found)
    return waits


def by_first_appearance(arrivals: Sequence[Arrival]) -> dict[str, list[int]]:
    """Return the numbers of each key in the order in which their ids first appeared."""
    numbers: dict[str, list[int]] = {}
    seen = set()
    for id, key, number in arrivals:
        if id not in seen:
            seen.add(id)
            numbers.setdefault(key, []).append(number)
    return numbers


class BrokerFaults(ABC):
    """Subclass it with a fixture that sets up the broker, and implement the hooks.

    Attributes:
        ordered: whether the broker keeps the order of each key.
        publish_timeout: seconds within which it answers on any machine unless it
            stalls.
    """

    ordered: ClassVar[bool] = True
    publish_timeout: ClassVar[float] = 2.0

    @pytest.fixture(autouse=True)
    def parts(
        self,
        relays: Relays,
        writer: Writer,
        inspection: Inspection,
        proxy: MakeProxy,
        full: bool,
    ) -> None:
        self.relays = relays
        self.writer = writer
        self.inspection = inspection
        self.make_proxy = proxy
        self.count = 20_000 if full else 600
        self.cuts = range(1_000, 6_000, 1_000 if full else 2_000)

    @abstractmethod
    def broker_url(self) -> str:
        """Return the broker's own URL, not the proxy's; it is ready for `TOPIC`."""

    @abstractmethod
    def arrivals(self) -> Sequence[Arrival]:
        """Return id, key and number of all arrivals, in order. Called at the end."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the broker, as a crash would."""

    @abstractmethod
    def start(self) -> None:
        """Restart the broker with its data."""

    @pytest.mark.timeout(900)
    def test_killed_and_restarted_in_mid_drain(self) -> None:
        relay = self.drain()
        self.kill()
        self.expect_lost(relay)
        self.expect_all(relay, self.start)

    @pytest.mark.timeout(900)
    def test_connection_cut_in_mid_batch(self) -> None:
        relay = self.drain()
        for upto in self.cuts:
            # Hold all traffic until the cut is armed: otherwise the relay could finish
            # before this process reaches its next line.
            self.proxy.stall()
            self.writer.add(TO_BE_CUT)
            left = self.inspection.unsettled()
            lost = relay.log().count("BrokerLost")
            self.proxy.cut_after(upto)
            self.proxy.resume()
            relay.wait_for_log("BrokerLost", times=lost + 1)
            self.wait_for_progress(left)
        self.proxy.stall()
        self.writer.add(TO_BE_CUT)
        self.expect_all(relay, self.proxy.resume)

    @pytest.mark.timeout(900)
    def test_stall_longer_than_the_publish_timeout(self) -> None:
        relay = self.drain(f"--publish-timeout={self.publish_timeout}s")
        self.proxy.stall()
        self.expect_lost(relay)
        self.expect_all(relay, self.proxy.resume)

    def drain(self, *options: str) -> RunningProcess:
        """Start a relay, and return while it is draining."""
        self.writer.add(self.count)
        self.proxy, url = self.make_proxy(self.broker_url())
        # Slow enough that the drain is unfinished when the fault comes, however late.
        self.proxy.slow(0.05)
        relay = self.relays.start(
            url,
            f"--batch-size={_BATCH}",
            f"--concurrency={CONCURRENCY}",
            "--log-level=debug",  # logs every loss of the broker
            *options,
        )
        wait_for("some is published", lambda: self.inspection.unsettled() < self.count)
        return relay

    def expect_lost(self, relay: RunningProcess, times: int = 2) -> None:
        """Wait until the relay misses the broker; check that no attempt is charged."""
        # So that there is work to interrupt, however late the fault came.
        self.writer.add(TO_BE_CUT)
        relay.wait_for_log("BrokerLost", times=times)
        assert self.inspection.unsettled()
        assert self.inspection.charged() == 0

    def expect_all(
        self, relay: RunningProcess, go_on: Callable[[], None] = lambda: None
    ) -> None:
        """End the fault, and check that everything added arrived.

        Args:
            go_on: ends the fault. The unsettled messages are counted before.
        """
        left = self.inspection.unsettled()
        assert left
        go_on()
        self.proxy.slow(0)
        lost = len(announced_waits(relay))
        self.wait_for_progress(left)
        waits = announced_waits(relay)
        assert len(waits) - lost <= _FAILED_TRIALS
        assert max(waits, default=0.0) <= LONGEST_WAIT
        self.inspection.wait_until_settled()
        arrivals = self.arrivals()
        arrived = by_first_appearance(arrivals)
        expected = self.writer.numbers()
        if not self.ordered:
            arrived = {key: sorted(numbers) for key, numbers in arrived.items()}
        assert arrived == expected
        # Each loss of the broker can duplicate the messages in flight.
        lost = relay.log().count("BrokerLost")
        assert len(arrivals) <= self.writer.added + lost * IN_FLIGHT
        assert self.inspection.charged() == 0
        relay.wait_for_log("BrokerRecovered")

    def wait_for_progress(self, left: int) -> None:
        """Wait until fewer than `left` messages are unsettled."""
        wait_for(
            "it goes on",
            lambda: self.inspection.unsettled() < left,
            seconds=_RECOVERY,
            pause=0.1,
        )
