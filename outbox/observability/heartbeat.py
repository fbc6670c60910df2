"""The pulse: proof, for whoever watches a process, that its event loop goes round.

It says nothing of the database or the broker. Those who are away come back, and a
process that was restarted meanwhile is no better off.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from outbox.errors import ConfigError

__all__ = ["PULSE_VARIABLE", "Pulse"]

PULSE_VARIABLE: Final = "PILLARBOX_PULSE_FILE"
SYSTEMD_VARIABLE: Final = "NOTIFY_SOCKET"
INTERVAL_SECONDS: Final = 5.0


class Pulse:
    """Touches a file, tells systemd, both or neither, every five seconds.

    Args:
        file: whose time of change is that of the last beat.
        systemd: the socket on which systemd waits for the beats of its watchdog.
    """

    def __init__(self, file: Path | None = None, systemd: str | None = None) -> None:
        self._file = file
        # A leading @ stands for the NUL of a name that lies in no directory.
        abstract = systemd is not None and systemd.startswith("@")
        self._systemd = f"\0{systemd[1:]}" if systemd and abstract else systemd

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Pulse":
        """Take both from the variables that an image or systemd sets."""
        file = environment.get(PULSE_VARIABLE)
        return cls(Path(file) if file else None, environment.get(SYSTEMD_VARIABLE))

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Beat for as long as the block runs.

        Raises:
            ConfigError: the file can't be written, or the socket is not there.
        """
        if self._file is None and self._systemd is None:
            yield
            return
        try:
            self._beat("READY=1")
        except OSError as error:
            raise ConfigError(
                f"the pulse can't beat: {error}; let {PULSE_VARIABLE} name a file in "
                "a directory that this user may write, or unset it"
            ) from error
        beating = asyncio.create_task(self._beat_on())
        try:
            yield
        finally:
            beating.cancel()
            # The last news is that of a stop: systemd waits for the drain, then.
            with suppress(OSError):
                self._tell("STOPPING=1")

    async def _beat_on(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            # A beat that fails is one that is missing.
            with suppress(OSError):
                self._beat("WATCHDOG=1")

    def _beat(self, news: str) -> None:
        if self._file is not None:
            self._file.touch()
        self._tell(news)

    def _tell(self, news: str) -> None:
        if self._systemd is not None:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
                line.sendto(news.encode(), self._systemd)
