"""Ports, directories and watchdogs of private servers.

A server must not outlive the process that started it, even if that process is killed.
So each server has a watchdog: a process that reads a pipe from the one that started the
server. When that one ends, for any reason, the pipe closes, and the watchdog stops the
server.
"""

import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["free_port", "private_directory", "unprivileged_user", "watched"]

# Below the ports that Linux assigns to clients. Otherwise, a client that keeps trying
# to reach a stopped server could be assigned the server's port, and connect to itself.
PORTS = range(15_000, 32_000)


MEMORY = Path("/dev/shm")  # noqa: S108 (mkdtemp makes our own directory in it)
ROOM = 4 << 30


def free_port() -> int:
    """Return a port of 127.0.0.1 that is not in use."""
    while True:
        port = random.choice(PORTS)  # noqa: S311 (not a secret)
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port


def unprivileged_user() -> pwd.struct_passwd | None:
    """Return a user for servers that refuse root; None if this process isn't root."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")


@contextmanager
def private_directory(
    prefix: str, *, owner: pwd.struct_passwd | None = None, durable: bool = True
) -> Iterator[Path]:
    """Yield a temporary directory that only this user, or `owner`, can enter.

    If it isn't `durable`, it is kept in memory if there is enough free space.
    """
    place = None
    if not durable and "TMPDIR" not in os.environ and has_room(MEMORY):
        place = MEMORY
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    try:
        if owner is not None:
            os.chown(directory, owner.pw_uid, owner.pw_gid)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def has_room(directory: Path) -> bool:
    """Return whether a directory has room for a server's data."""
    try:
        return shutil.disk_usage(directory).free >= ROOM and os.access(
            directory, os.W_OK
        )
    except OSError:
        return False


@contextmanager
def watched(directory: Path, pid_file: Path, end: signal.Signals) -> Iterator[None]:
    """Stop the server and remove its directory, even if this process is killed.

    The first line of `pid_file`, if the file exists, is the server's process id. `end`
    is the signal that stops the server at once.
    """
    watchdog = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, directory, pid_file, end.name],
        stdin=subprocess.PIPE,
        # Control-C in the terminal must reach only this process, which then cleans up.
        start_new_session=True,
        cwd="/",
    )
    try:
        yield
    finally:
        watchdog.communicate()


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll for a condition outside this process; return whether it became true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def is_running(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def watch(directory: Path, pid_file: Path, end: signal.Signals) -> None:
    """Run as the watchdog: wait until the pipe closes, then clean up."""
    sys.stdin.buffer.read()
    if not directory.exists():
        return
    with suppress(OSError, ValueError, IndexError):
        pid = int(pid_file.read_text().splitlines()[0])
        os.kill(pid, end)
        if not wait_until(lambda: not is_running(pid), seconds=10):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    watch(Path(sys.argv[1]), Path(sys.argv[2]), signal.Signals[sys.argv[3]])
