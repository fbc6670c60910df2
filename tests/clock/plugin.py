"""Makes each test begin at the same moment, or shortly before it."""

import os
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zlib import crc32

import pytest

from pillarbox.outbox import message_id
from tests.clock.setting import Clock

# How long before the moment a test begins: half of all tests take less than 0.3 s.
LEADS = (0.02, 0.1, 0.2, 0.4, 0.8, 1.6)
TO_SET_UP = timedelta(seconds=3)
TO_MIGRATE = timedelta(minutes=10)


class Moments:
    """The clock of a worker and of all processes that it starts."""

    def __init__(
        self, clock: Clock, moment: datetime, seed: str, *, crosses: bool
    ) -> None:
        self._clock = clock
        self._moment = moment
        self._seed = seed
        self._crosses = crosses

    def lead(self, test: str) -> timedelta:
        """Choose how long before the moment a test begins; every run differs."""
        return timedelta(seconds=random.Random(self._seed + test).choice(LEADS))

    @pytest.fixture(autouse=True)
    def set_up(self, request: pytest.FixtureRequest) -> None:
        """Set up a test shortly before the moment, from a template made earlier."""
        self._clock.set(self._moment - TO_MIGRATE if self._crosses else self._moment)
        # Ids continue from the last one, which could be from after the moment.
        message_id._last = 0
        if "template" in request.fixturenames:
            # Not earlier: pytest rewrites the assertions of plugins that it loads.
            from tests.fixtures.postgres import A_WEEK, FEW_DAYS

            for ahead in (FEW_DAYS, A_WEEK):
                request.getfixturevalue("template").name(ahead)
        self._clock.set(self._moment - TO_SET_UP if self._crosses else self._moment)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Begin a test at its lead before the moment."""
        if self._crosses:
            lead = self.lead(item.nodeid)
            item.add_report_section("call", "clock", f"begins {lead} before the moment")
            if (begin := self._moment - lead) > datetime.now(UTC):
                self._clock.set(begin)
        return (yield)


class Share:
    """One of several shares of the test files."""

    def __init__(self, share: str) -> None:
        self._number, self._shares = map(int, share.split("/"))

    def _has(self, path: Path, config: pytest.Config) -> bool:
        name = path.relative_to(config.rootpath).as_posix()
        return crc32(name.encode()) % self._shares == self._number

    def pytest_ignore_collect(
        self, collection_path: Path, config: pytest.Config
    ) -> bool | None:
        """Ignore the files of other shares."""
        is_test = collection_path.name.startswith("test_")
        return (is_test and not self._has(collection_path, config)) or None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Deselect tests of other shares, even if the command line names them."""
        others = [item for item in items if not self._has(item.path, config)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if self._has(item.path, config)]


def pytest_configure(config: pytest.Config) -> None:
    """Use a separate clock for this worker, which its tests set."""
    shared = Path(os.environ["FAKETIME_TIMESTAMP_FILE"])
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    clock = Clock.fork(shared, shared.with_name(worker))
    os.environ["FAKETIME_TIMESTAMP_FILE"] = str(clock.file)
    moments = Moments(
        clock,
        datetime.fromisoformat(os.environ["PILLARBOX_TEST_MOMENT"]),
        os.environ["PILLARBOX_TEST_SEED"],
        crosses=bool(os.environ["PILLARBOX_TEST_CROSSES"]),
    )
    config.pluginmanager.register(moments, "moments")
    if share := os.environ.get("PILLARBOX_TEST_SHARE"):
        config.pluginmanager.register(Share(share), "share")
