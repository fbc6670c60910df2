"""The heartbeat of a process: proof that its event loop is running.

It says nothing about the database or the broker: restarting the process wouldn't end
their outages.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from pillarbox.outbox.errors import ConfigError

HEARTBEAT_VARIABLE: Final = "PILLARBOX_HEARTBEAT_FILE"
INTERVAL_SECONDS: Final = 5.0


@asynccontextmanager
async def beating(environment: Mapping[str, str] = os.environ) -> AsyncIterator[None]:
    """Touch the file that the image names every five seconds while the block runs.

    Raises:
        ConfigError: the file can't be written.
    """
    name = environment.get(HEARTBEAT_VARIABLE)
    if not name:
        yield
        return
    try:
        _touch(name)
    except OSError as error:
        raise ConfigError(
            f"can't send a heartbeat: {error}; let {HEARTBEAT_VARIABLE} name a"
            " file in a directory that this user may write to, or unset it"
        ) from error
    touching = asyncio.create_task(_keep_touching(name))
    try:
        yield
    finally:
        touching.cancel()


async def _keep_touching(file: str) -> None:
    while True:
        await asyncio.sleep(INTERVAL_SECONDS)
        # A heartbeat that can't be sent counts as missing.
        with suppress(OSError):
            _touch(file)


def _touch(file: str) -> None:
    Path(file).touch()
