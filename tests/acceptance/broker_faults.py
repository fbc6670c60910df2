"""A broker in trouble under a relay, the same for every broker: a suite to bind.

Whatever happens to the broker, nothing is lost, keys keep their order by first
appearance, no attempt is charged, and the relay goes on with its next trial.
"""

import re
import time
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
# More bytes than any cut lets through.
TO_BE_CUT = 200
# No promise: what is promised is counted in trials, and in the waits between them.
_RECOVERY = 90.0
LONGEST_WAIT = 15.0
# The trial under way may still meet the broker that was away.
_FAILED_TRIALS = 1

Arrival: TypeAlias = tuple[str, str, int]
# Without the lines that sum up several.
_LOST = re.compile(r"BrokerLost .*\bseconds=([0-9.]+)$", re.MULTILINE)
_SUMMARY = re.compile(r"BrokerLost .*\brepeated=")
Figures: TypeAlias = Callable[[str, object], None]


def announced_waits(relay: RunningProcess) -> list[float]:
    """Return the seconds until the next trial for each time the broker was lost."""
    # The last line may still be on its way.
    log = relay.log().rpartition("\n")[0]
    waits = [float(seconds) for seconds in _LOST.findall(log)]
    assert len(waits) == log.count("BrokerLost") - len(_SUMMARY.findall(log))
    return waits


def by_first_appearance(arrivals: Sequence[Arrival]) -> dict[str, list[int]]:
    """Return the numbers of each key, from the id, key and number of each arrival."""
    numbers: dict[str, list[int]] = {}
    seen = set()
    for id, key, number in arrivals:
        if id not in seen:
            seen.add(id)
            numbers.setdefault(key, []).append(number)
    return numbers


class BrokerFaults(ABC):
    """Bind it: a fixture of your own that sets up the broker, and the hooks.

    Attributes:
        ordered: whether the broker keeps the order of a key at all.
        publish_timeout: seconds in which it answers on any machine, unless it stalls.
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
        figures: Figures,
        full: bool,
    ) -> None:
        self.relays = relays
        self.writer = writer
        self.inspection = inspection
        self.make_proxy = proxy
        self.figures = figures
        self.count = 20_000 if full else 2_000

    @abstractmethod
    def broker_url(self) -> str:
        """Return the URL of the broker, ready for `TOPIC`; without the proxy."""

    @abstractmethod
    def arrivals(self) -> Sequence[Arrival]:
        """Return id, key and number of all arrivals, in order. Called at the end."""

    @abstractmethod
    def kill(self) -> None:
        """End the broker as a crash does."""

    @abstractmethod
    def start(self) -> None:
        """Start it again, with its data."""

    @pytest.mark.timeout(900)
    def test_killed_and_restarted_in_mid_drain(self) -> None:
        relay = self.drain()
        self.kill()
        # However late the fault came, there is work left for it.
        self.writer.add(TO_BE_CUT)
        relay.wait_for_log("BrokerLost", times=2)
        assert self.inspection.unsettled()
        assert self.inspection.charged() == 0
        self.expect_all(relay, self.start)

    @pytest.mark.timeout(900)
    def test_connection_cut_in_mid_batch(self) -> None:
        relay = self.drain()
        for cut in range(1, 6):
            # Nothing flows until there is something to cut: a relay may be done sooner
            # than this process gets to its next line.
            self.proxy.stall()
            self.writer.add(TO_BE_CUT)
            left = self.inspection.unsettled()
            lost = relay.log().count("BrokerLost")
            self.proxy.cut_after(1_000 * cut)
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
        self.writer.add(TO_BE_CUT)
        relay.wait_for_log("BrokerLost", times=2)
        assert self.inspection.unsettled()
        assert self.inspection.charged() == 0
        self.expect_all(relay, self.proxy.resume)

    def drain(self, *options: str) -> RunningProcess:
        """Start a relay, and return in the midst of its work."""
        self.writer.add(self.count)
        self.proxy, url = self.make_proxy(self.broker_url())
        # So that the work lasts long enough to fall into it.
        self.proxy.slow(0.01)
        relay = self.relays.start(
            url,
            f"--batch-size={_BATCH}",
            f"--concurrency={CONCURRENCY}",
            "--log-level=debug",  # each time that the broker is lost
            *options,
        )
        enough = self.count * 9 // 10
        wait_for("some is published", lambda: self.inspection.unsettled() < enough)
        # Nor may it end before the fault comes, however late that is.
        self.proxy.slow(0.05)
        return relay

    def expect_all(
        self, relay: RunningProcess, go_on: Callable[[], None] = lambda: None
    ) -> None:
        """End a trouble, and compare what arrived in the end with what was added.

        Args:
            go_on: ends the trouble. What is left is counted before.
        """
        left = self.inspection.unsettled()
        assert left
        go_on()
        self.proxy.slow(0)
        lost = len(announced_waits(relay))
        back_at = time.monotonic()
        self.wait_for_progress(left)
        seconds = time.monotonic() - back_at
        waits = announced_waits(relay)
        failed = len(waits) - lost
        self.figures("went on after s", round(seconds, 2))
        self.figures("after failed trials", failed)
        assert failed <= _FAILED_TRIALS
        assert max(waits, default=0.0) <= LONGEST_WAIT
        self.inspection.wait_until_settled()
        arrivals = self.arrivals()
        arrived = by_first_appearance(arrivals)
        expected = self.writer.numbers()
        if not self.ordered:
            arrived = {key: sorted(numbers) for key, numbers in arrived.items()}
        assert arrived == expected
        # Each time that the broker was lost, what was in flight may be there twice.
        lost = relay.log().count("BrokerLost")
        assert len(arrivals) <= self.writer.added + lost * IN_FLIGHT
        assert self.inspection.charged() == 0
        relay.wait_for_log("BrokerRecovered")

    def wait_for_progress(self, left: int) -> None:
        """Wait until fewer than `left` messages are left."""
        wait_for(
            "it goes on",
            lambda: self.inspection.unsettled() < left,
            seconds=_RECOVERY,
        )
