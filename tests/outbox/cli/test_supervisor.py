"""What runs beside a process ends with it, and doesn't fail unheard."""

import asyncio

import pytest

from outbox.cli.supervisor import Beside
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


async def test_what_runs_beside_is_ended_when_the_process_has_drained() -> None:
    process = Process()
    ended = []

    async def side() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(process.drained)

    both = Beside(process, [side])
    running = asyncio.create_task(both.run())
    asyncio.get_running_loop().call_soon(both.stop)
    await running
    assert ended == [True]


async def test_what_fails_beside_stops_the_process_and_is_raised() -> None:
    process = Process()

    async def side() -> None:
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        await Beside(process, [side]).run()
    assert process.drained
