"""Runs tests while all clocks, the server's and the clients', say another time.

    python -m tests.clock            every moment, with the tests of the database
    python -m tests.clock --short    what CI runs: what matters most
    python -m tests.clock -- tests/outbox/administration/test_upkeep.py -x

What follows `--` goes to pytest. The clock runs on from each moment, by libfaketime.
"""

import argparse
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from typing_extensions import override

from tests.clock.setting import Clock, library

HERE: Final = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When the tests of a run begin, and where the server is.

    Attributes:
        zone: the time zone of the server and of every process.
        each: whether each test begins shortly before the next midnight.
    """

    at: datetime
    zone: str = "UTC"
    each: bool = False

    @override
    def __str__(self) -> str:
        each = ", and each test shortly before midnight" if self.each else ""
        return f"{self.at:%Y-%m-%d %H:%M:%S} UTC, server in {self.zone}{each}"


def say(line: str) -> None:
    """Print a line at once, before what pytest prints."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def utc(text: str) -> datetime:
    """Read a moment."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


# All lie in the past. libfaketime shows the true time to a signal handler that breaks
# into epoll_wait(): by a clock that is ahead of it, a lock_timeout of PostgreSQL would
# never come to its end.
MIDNIGHT: Final = Moment(at=utc("2025-05-31 23:00"), each=True)
# Clocks in Berlin change at 01:00 UTC.
SPRING: Final = Moment(at=utc("2026-03-29 00:59:30"), zone="Europe/Berlin")
AUTUMN: Final = Moment(at=utc("2025-10-26 00:59:30"), zone="Europe/Berlin")
LEAP: Final = Moment(at=utc("2024-02-29 12:01"))
ALL: Final = (
    MIDNIGHT,
    SPRING,
    AUTUMN,
    LEAP,
    Moment(at=utc("2024-02-28 23:59:30")),
    Moment(at=utc("2025-12-31 23:59:30")),
    Moment(at=utc("2026-01-05 00:00:30")),
    Moment(at=utc("2026-01-05 11:59:30")),
)
SHORT: Final = (MIDNIGHT, AUTUMN, LEAP)
DATABASE: Final = (
    "-m=database",
    "tests/outbox",
    "tests/relay",
    "tests/inbox",
    "tests/migrations",
    "tests/plans",
    # What these start has clocks of its own.
    "--ignore=tests/inbox/frameworks",
)
# Days, partitions, retention and receipts, from each side.
FEW: Final = (
    "tests/outbox/administration/test_upkeep.py",
    "tests/migrations/test_beside_partman.py",
    "tests/outbox/test_add_in_sql.py",
    "tests/relay/test_claim.py",
    "tests/inbox/test_receipt.py",
)


def main(arguments: Sequence[str]) -> int:
    """Run the tests at each moment; give how many runs failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.clock")
    parser.add_argument("--short", action="store_true", help="what CI runs")
    parser.add_argument("--workers", default="2", help="processes that share the tests")
    parser.add_argument("pytest", nargs="*", help="what goes to pytest, after --")
    chosen = parser.parse_args(arguments)
    if os.environ.get("PILLARBOX_DATABASE_URL"):
        parser.error("the clock of a server that is given can't be set: leave it out")
    try:
        library()
    except FileNotFoundError as error:
        parser.error(str(error))
    tests = chosen.pytest or (FEW if chosen.short else DATABASE)
    pytest = [sys.executable, "-m", "pytest", "-p", "tests.clock.plugin"]
    failed = []
    for moment in SHORT if chosen.short else ALL:
        say(f"\n=== {moment}: {' '.join(tests)}")
        with ExitStack() as directories:
            if moment.each:
                directory = Path(
                    directories.enter_context(
                        TemporaryDirectory(prefix="pillarbox-clock-")
                    )
                )
                directory.chmod(0o755)  # the server is another user
                clock = Clock(directory / "offset")
                clock.set(moment.at)
                says = {
                    "FAKETIME_TIMESTAMP_FILE": str(clock.file),
                    "FAKETIME_NO_CACHE": "1",
                }
            else:
                # Nobody sets it anew, so nobody need read a file for each look at it.
                ahead = (moment.at - datetime.now(UTC)).total_seconds()
                says = {"FAKETIME": f"{ahead:+.0f}"}
            done = subprocess.run(
                [*pytest, "-n", chosen.workers, *tests],
                env={**os.environ, **environment(moment), **says},
                check=False,
            )
        if done.returncode != 0:
            failed.append(moment)
    for moment in failed:
        say(f"FAILED at {moment}")
    return len(failed)


def environment(moment: Moment) -> Mapping[str, str]:
    """Return the variables that make a process and its children follow a clock."""
    paths = [str(HERE / "sleeping"), os.environ.get("PYTHONPATH", "")]
    return {
        "LD_PRELOAD": str(library()),
        # What waits for so many seconds waits by that clock.
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TZ": moment.zone,
        "PILLARBOX_TEST_TIMEZONE": moment.zone,
        "PILLARBOX_TEST_MIDNIGHTS": secrets.token_hex(4) if moment.each else "",
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
