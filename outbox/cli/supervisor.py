"""A process of ours with what runs beside it for as long as it does."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeAlias

from outbox.cli.command import Stoppable
from outbox.gather import end

Side: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


class Beside:
    """Runs a process with tasks beside it, which never end by themselves.

    They are cancelled when it has ended. One that fails stops it, and its error is
    raised when the process has drained.
    """

    def __init__(self, process: Stoppable, sides: Sequence[Side]) -> None:
        self._process = process
        self._sides = sides

    def stop(self) -> None:
        """Stop the process."""
        self._process.stop()

    async def run(self) -> None:
        """Run it until it ends."""
        tasks = [asyncio.create_task(side()) for side in self._sides]
        for task in tasks:
            task.add_done_callback(self._on_end)
        try:
            await self._process.run()
        finally:
            failed = [task for task in tasks if task.done()]
            await end(tasks)
        for task in failed:
            task.result()

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self.stop()
