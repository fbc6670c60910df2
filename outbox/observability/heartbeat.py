"""The heartbeat of a process: proof that its event loop is running.

It says nothing about the database or the broker: restarting the process wouldn't end
their outages.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from outbox.errors import ConfigError

HEARTBEAT_VARIABLE: Final = "PILLARBOX_HEARTBEAT_FILE"
SYSTEMD_VARIABLE: Final = "NOTIFY_SOCKET"
INTERVAL_SECONDS: Final = 5.0


class Heartbeat:
    """Touches a file and notifies systemd every five seconds, if they are given.

    Args:
        file: a file whose modification time is that of the last heartbeat.
        systemd: the socket on which systemd expects notifications.
    """

    def __init__(self, file: Path | None = None, systemd: str | None = None) -> None:
        self._file = file
        # A leading @ stands for the NUL byte of an abstract socket.
        abstract = systemd is not None and systemd.startswith("@")
        self._systemd = f"\0{systemd[1:]}" if systemd and abstract else systemd

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] = os.environ
    ) -> "Heartbeat":
        """Read both from the variables that the image or systemd sets."""
        file = environment.get(HEARTBEAT_VARIABLE)
        return cls(Path(file) if file else None, environment.get(SYSTEMD_VARIABLE))

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Send heartbeats for as long as the block runs.

        Raises:
            ConfigError: the file can't be written, or the socket doesn't exist.
        """
        if self._file is None and self._systemd is None:
            yield
            return
        try:
            self._beat("READY=1")
        except OSError as error:
            raise ConfigError(
                f"can't send a heartbeat: {error}; let {HEARTBEAT_VARIABLE} name a"
                " file in a directory that this user may write to, or unset it"
            ) from error
        beating = asyncio.create_task(self._beat_on())
        try:
            yield
        finally:
            beating.cancel()
            # This makes systemd wait for the drain.
            with suppress(OSError):
                self._notify("STOPPING=1")

    async def _beat_on(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            # A heartbeat that can't be sent counts as missing.
            with suppress(OSError):
                self._beat("WATCHDOG=1")

    def _beat(self, state: str) -> None:
        if self._file is not None:
            self._file.touch()
        self._notify(state)

    def _notify(self, state: str) -> None:
        if self._systemd is not None:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.sendto(state.encode(), self._systemd)
