"""libfaketime, and what it reads in every process that follows it."""

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Self


class Clock:
    """A clock that runs beside the right one, at a distance that can be changed."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._ahead = 0.0

    @classmethod
    def fork(cls, original: Path, file: Path) -> Self:
        """Make another that says the same, for a process that follows the first."""
        clock = cls(file)
        clock._write(float(original.read_text()))
        return clock

    def set(self, now: datetime) -> None:
        """Make it say `now`, at once for all who follow it.

        The caller has to see what it says, or the right time before it is first set.
        """
        self._write(self._ahead + (now - datetime.now(UTC)).total_seconds())

    def _write(self, ahead: float) -> None:
        self._ahead = ahead
        beside = self.file.with_suffix(".new")
        beside.write_text(f"{ahead:+.6f}\n")
        beside.chmod(0o644)
        beside.replace(self.file)


def library() -> Path:
    """Find libfaketime, in the form for programs with threads.

    Raises:
        FileNotFoundError: it isn't installed.
    """
    for found in chain(
        Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"),
        Path("/usr/lib").glob("faketime/libfaketimeMT.so.1"),
    ):
        return found
    raise FileNotFoundError(
        "libfaketime is missing: apt-get install faketime, or make clock"
    )


def seconds_ahead(environment: Mapping[str, str] = os.environ) -> float:
    """Return by how much the clock of this process is ahead of the right one."""
    if says := environment.get("FAKETIME"):
        return float(says)
    if file := environment.get("FAKETIME_TIMESTAMP_FILE"):
        return float(Path(file).read_text())
    return 0.0
