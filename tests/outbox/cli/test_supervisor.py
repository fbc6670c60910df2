"""Background tasks end with their process, and their errors are raised."""

import asyncio

import pytest

from outbox.cli.supervisor import supervise
from outbox.errors import ConfigError


class Process:
    """Runs until it is stopped."""

    def __init__(self) -> None:
        self._stopped = asyncio.Event()
        self.drained = False

    def stop(self) -> None:
        self._stopped.set()

    async def run(self) -> None:
        await self._stopped.wait()
        self.drained = True


async def test_background_tasks_end_once_the_process_has_drained() -> None:
    process = Process()
    ended = []

    async def background() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(process.drained)

    asyncio.get_running_loop().call_soon(process.stop)
    await supervise(process.run, process.stop, [background])
    assert ended == [True]


async def test_a_failing_background_task_stops_the_process_and_is_raised() -> None:
    process = Process()

    async def background() -> None:
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        await supervise(process.run, process.stop, [background])
    assert process.drained
