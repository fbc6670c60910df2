"""Runs tests with all clocks, the server's and the clients', set to another time.

    python -m tests.clock            all database tests at every moment: takes hours
    python -m tests.clock --once     each file at one moment, tomorrow at the next one
    python -m tests.clock --short    the most important tests, as CI runs them
    python -m tests.clock --moment spring --moment autumn
    python -m tests.clock -- tests/outbox/administration/test_upkeep.py -x

Arguments after `--` go to pytest. libfaketime starts every test at the moment.
"""

import argparse
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from typing_extensions import override

from tests.clock.setting import Clock, preload, shared_memory

HERE: Final = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The time at which each test begins, and the server's time zone.

    Attributes:
        name: its name in `--moment`.
        zone: the time zone of the server and of every process.
        crosses: whether tests begin up to two seconds before the moment, with a
            database made before it; otherwise tests begin, and the database is made,
            at the moment.
    """

    name: str
    at: datetime
    zone: str = "UTC"
    crosses: bool = True

    @override
    def __str__(self) -> str:
        begins = "shortly before" if self.crosses else "at"
        return (
            f"{self.name}: each test begins {begins} {self.at:%Y-%m-%d %H:%M:%S} UTC,"
            f" server in {self.zone}"
        )


def say(line: str) -> None:
    """Print a line at once, before pytest's output."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def utc(text: str) -> datetime:
    """Parse a moment."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


MIDNIGHT: Final = Moment(name="midnight", at=utc("2025-06-01 00:00"))
# Clocks in Berlin change at 01:00 UTC.
SPRING: Final = Moment(name="spring", at=utc("2026-03-29 01:00"), zone="Europe/Berlin")
AUTUMN: Final = Moment(name="autumn", at=utc("2025-10-26 01:00"), zone="Europe/Berlin")
# From noon on, pg_partman makes partitions for one more day.
LEAP: Final = Moment(name="leap", at=utc("2024-02-29 12:01"), crosses=False)
ALL: Final = (
    MIDNIGHT,
    SPRING,
    AUTUMN,
    LEAP,
    Moment(name="leap-eve", at=utc("2024-02-29 00:00")),
    Moment(name="leap-night", at=utc("2024-03-01 00:00")),
    Moment(name="new-year", at=utc("2026-01-01 00:00")),
    Moment(name="after-midnight", at=utc("2026-01-05 00:00:01"), crosses=False),
    Moment(name="noon", at=utc("2026-01-05 12:00")),
)
SHORT: Final = (MIDNIGHT, AUTUMN, LEAP)
DATABASE: Final = (
    "-m=database",
    "tests/outbox",
    "tests/relay",
    "tests/inbox",
    "tests/migrations",
    "tests/plans",
    "tests/brokers/postgres",
    # The processes that these start have clocks of their own.
    "--ignore=tests/inbox/frameworks",
    # These tests are not about a browser with another clock.
    "--ignore=tests/outbox/web/test_in_browser.py",
)
# A test checks that each folder is either run by this program or listed here.
LEFT_OUT: Final = {
    "tests/acceptance": "lasts longer than a moment; its faults have no time of day",
    "tests/benchmarks": "measures nothing of the database's days",
    "tests/brokers": "servers of brokers keep the true time, except PostgreSQL",
    "tests/clock": "is what sets the clocks",
    "tests/containers": "a container keeps the true time",
    "tests/fixtures": "has no tests",
    "tests/install": "starts bare environments, without libfaketime",
    "tests/matrix": "has no tests",
    "tests/servers": "has no tests",
    "tests/mutants": "has no tests",
    "tests/release": "builds packages, which have no days",
    "tests/upgrade": "starts bare environments, without libfaketime",
    "tests/models": "has a clock of its own, which it moves through every order",
    "tests/typing": "has no tests that run",
}
# Days, partitions, retention and receipts, from each side.
FEW: Final = (
    "tests/outbox/administration/test_upkeep.py",
    "tests/migrations/test_beside_partman.py",
    "tests/outbox/test_add_in_sql.py",
    "tests/relay/test_claim.py",
    "tests/inbox/test_receipt.py",
)
_NO_TESTS: Final = 5  # pytest's exit status for a share without files


def main(arguments: Sequence[str]) -> int:
    """Run the tests at each moment; return how many runs failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.clock")
    parser.add_argument("--short", action="store_true", help="what CI runs")
    parser.add_argument(
        "--once",
        action="store_true",
        help="run each file at only one of the moments, on each day at another one",
    )
    parser.add_argument(
        "--moment",
        action="append",
        choices=[moment.name for moment in ALL],
        help="only this moment; may be repeated",
    )
    parser.add_argument("--workers", default="2", help="processes that share the tests")
    parser.add_argument("pytest", nargs="*", help="what goes to pytest, after --")
    chosen = parser.parse_args(arguments)
    if os.environ.get("PILLARBOX_DATABASE_URL"):
        parser.error("PILLARBOX_DATABASE_URL is set, but its clock can't be: unset it")
    # Lets `shared_memory` remove its files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    tests = chosen.pytest or (FEW if chosen.short else DATABASE)
    moments: Sequence[Moment] = SHORT if chosen.short else ALL
    if chosen.moment:
        moments = [moment for moment in ALL if moment.name in chosen.moment]
    today = datetime.now(UTC).toordinal()
    outcomes = []
    for number, moment in enumerate(moments):
        share = f"{(number + today) % len(moments)}/{len(moments)}"
        say(f"\n=== {moment}: {' '.join(tests)}")
        started = time.monotonic()
        try:
            status = run(
                moment,
                ["-n", chosen.workers, *tests],
                {"PILLARBOX_TEST_SHARE": share} if chosen.once else {},
            )
        except FileNotFoundError as error:
            parser.error(str(error))
        passed = status == 0 or (chosen.once and status == _NO_TESTS)
        outcomes.append(passed)
        say(
            f"=== {'passed' if passed else 'FAILED'} after"
            f" {time.monotonic() - started:.0f} s: {moment}"
        )
    return outcomes.count(False)


def run(moment: Moment, arguments: Sequence[str], more: Mapping[str, str]) -> int:
    """Run pytest at a moment; return its exit status."""
    with (
        TemporaryDirectory(prefix="pillarbox-clock-") as directory,
        shared_memory() as shared,
    ):
        Path(directory).chmod(0o755)  # the server runs as another user
        clock = Clock(Path(directory) / "offset")
        clock.set(moment.at)
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "tests.clock.plugin", *arguments],
            env={
                **os.environ,
                **environment(moment),
                **more,
                "LD_PRELOAD": preload(Path(directory)),
                "FAKETIME_TIMESTAMP_FILE": str(clock.file),
                "FAKETIME_NO_CACHE": "1",
                "FAKETIME_SHARED": shared,
            },
            check=False,
        ).returncode


def environment(moment: Moment) -> Mapping[str, str]:
    """Return the variables that make a process and its children use a clock."""
    paths = [str(HERE / "sleeping"), os.environ.get("PYTHONPATH", "")]
    return {
        # Waits for a number of seconds use the monotonic clock.
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TZ": moment.zone,
        "PILLARBOX_TEST_TIMEZONE": moment.zone,
        "PILLARBOX_TEST_MOMENT": moment.at.isoformat(),
        "PILLARBOX_TEST_CROSSES": "1" if moment.crosses else "",
        "PILLARBOX_TEST_SEED": secrets.token_hex(4),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
