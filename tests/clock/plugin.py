"""Lets each test begin shortly before the same midnight."""

import os
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from outbox import message_id
from tests.clock.setting import Clock

# How long before midnight a test begins: half of all tests take less than 0.3 s.
LEADS = (0.02, 0.1, 0.2, 0.4, 0.8, 1.6)
TO_SET_UP = 3.0


class Midnights:
    """The clock of one worker and of all that it starts."""

    def __init__(self, clock: Clock, seed: str) -> None:
        self._clock = clock
        self._seed = seed
        tomorrow = datetime.now(UTC) + timedelta(days=1)
        self._midnight = tomorrow.replace(hour=0, minute=0, second=0, microsecond=0)

    def before(self, distance: timedelta) -> datetime:
        """Return the moment so long before midnight."""
        return self._midnight - distance

    def lead(self, test: str) -> float:
        """Choose for a test, each run in another way."""
        return random.Random(self._seed + test).choice(LEADS)

    @pytest.fixture(autouse=True)
    def evening(self, request: pytest.FixtureRequest) -> None:
        """Set up a test in the last seconds of a day, with that day's template."""
        self._clock.set(self.before(timedelta(minutes=10)))
        # Ids go on from the last one, and that was made after midnight.
        message_id._last = 0
        if "template" in request.fixturenames:
            request.getfixturevalue("template").name()
        self._clock.set(self.before(timedelta(seconds=TO_SET_UP)))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Begin a test at its lead."""
        lead = self.lead(item.nodeid)
        item.add_report_section("call", "clock", f"begins {lead} s before midnight")
        if (moment := self.before(timedelta(seconds=lead))) > datetime.now(UTC):
            self._clock.set(moment)
        return (yield)


def pytest_configure(config: pytest.Config) -> None:
    """Follow a clock of this worker's own, if each test is to have its midnight."""
    if seed := os.environ.get("PILLARBOX_TEST_MIDNIGHTS"):
        shared = Path(os.environ["FAKETIME_TIMESTAMP_FILE"])
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        clock = Clock.fork(shared, shared.with_name(worker))
        os.environ["FAKETIME_TIMESTAMP_FILE"] = str(clock.file)
        config.pluginmanager.register(Midnights(clock, seed), "midnights")
