"""libfaketime, and the files that every process under it reads."""

import ctypes
import os
import secrets
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Final, Self

FOLLOWERS: Final[set[Callable[[], None]]] = set()
"""Functions that are called whenever this process has set a clock."""


class Clock:
    """A clock with an adjustable offset from the real one."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._ahead = 0.0

    @classmethod
    def fork(cls, original: Path, file: Path) -> Self:
        """Make a clock with the same time, for a process that uses the original."""
        clock = cls(file)
        clock._write(float(original.read_text()))
        return clock

    def set(self, now: datetime) -> None:
        """Set it to `now`, at once for every process that uses it.

        The calling process has to use this clock, or the true time before the first
        call.
        """
        self._write(self._ahead + (now - datetime.now(UTC)).total_seconds())

    def _write(self, ahead: float) -> None:
        self._ahead = ahead
        beside = self.file.with_suffix(".new")
        beside.write_text(f"{ahead:+.6f}\n")
        beside.chmod(0o644)
        beside.replace(self.file)
        for follow in FOLLOWERS:
            follow()


@contextmanager
def shared_memory() -> Iterator[str]:
    """Yield a FAKETIME_SHARED for processes of every user; removed after the block.

    Without it, a process makes a semaphore and a shared memory segment for itself and
    its children, and leaves them behind when it is killed.
    """
    name = f"pillarbox_clock_{secrets.token_hex(4)}"
    semaphore = Path("/dev/shm", f"sem.{name}")
    segment = Path("/dev/shm", name)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sem_open.restype = ctypes.c_void_p
    try:
        opened = libc.sem_open(f"/{name}".encode(), os.O_CREAT | os.O_EXCL, 0o600, 1)
        if not opened:
            raise OSError(ctypes.get_errno(), "sem_open failed", str(semaphore))
        libc.sem_close(ctypes.c_void_p(opened))
        # Ticks, a file position, and four times that aren't known yet.
        segment.write_bytes(struct.pack("QQ" + "qq" * 4, 0, 0, *(0, -1) * 4))
        for path in (semaphore, segment):
            path.chmod(0o666)  # the server runs as another user
        yield f"/{name} /{name}"
    finally:
        semaphore.unlink(missing_ok=True)
        segment.unlink(missing_ok=True)


def preload(directory: Path) -> str:
    """Return the LD_PRELOAD of processes that use a clock.

    Args:
        directory: where the compiled library is written; the server must be able to
            read it.

    Raises:
        FileNotFoundError: libfaketime or a C compiler isn't installed.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError(
            "a C compiler is missing: apt-get install gcc libc6-dev, or make clock"
        )
    waiting = directory / "waiting.so"
    source = Path(__file__).with_name("waiting.c")
    faketime = library()
    subprocess.run([compiler, "-shared", "-fPIC", "-o", waiting, source], check=True)
    waiting.chmod(0o755)
    return f"{waiting} {faketime}"


def library() -> Path:
    """Find libfaketime's library for programs with threads.

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
    """Return how many seconds this process's clock is ahead of the true time."""
    if file := environment.get("FAKETIME_TIMESTAMP_FILE"):
        return float(Path(file).read_text())
    return 0.0
