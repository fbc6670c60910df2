"""The long polls that wait for messages of Amazon SQS, each in its own task.

They aren't part of `receive`: a cancelled poll loses the messages that SQS has just
returned, until their visibility timeout ends. A queue has one poll, and more while the
answers are full.
"""

import asyncio
from itertools import count
from typing import Final

from inbox.sources.sqs.holding import Holding
from inbox.sources.sqs.queue import MAX_RECEIVED, SqsQueue
from outbox.gather import end

_MAX_POLLS: Final = 4
# Messages that arrive at an abandoned poll are invisible until their timeout ends.
_LAST_POLL: Final = 2.0


class Polls:
    """Fills a holding. For one event loop.

    Args:
        wait, visibility: in seconds, as in SQS's API.

    Attributes:
        queues: by name.
        news: set when messages have arrived, or a poll failed.
        failure: why the last poll failed, if it did.
        reclaimed: how many messages SQS had delivered before.
    """

    def __init__(self, holding: Holding, *, wait: int, visibility: int) -> None:
        self.queues: dict[str, SqsQueue] = {}
        self.news = asyncio.Event()
        self.failure: BaseException | None = None
        self.reclaimed = 0
        self._holding = holding
        self._wait = wait
        self._visibility = visibility
        self._numbers = count()
        self._tasks: dict[asyncio.Task[None], SqsQueue] = {}
        self._wanted: dict[SqsQueue, int] = {}

    def start(self, limit: int) -> None:
        """Start as many polls as the queues seem to need."""
        at_work = list(self._tasks.values())
        for queue in self.queues.values():
            for _ in range(self._wanted.get(queue, 1) - at_work.count(queue)):
                task = asyncio.create_task(self._poll(queue, min(limit, MAX_RECEIVED)))
                self._tasks[task] = queue
                task.add_done_callback(self._tasks.pop)

    async def stop(self) -> None:
        """Wait briefly for them to end by themselves."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_LAST_POLL)
        await self.cancel()

    async def cancel(self) -> None:
        """Cancel them; messages that they would have received are redelivered."""
        await end(self._tasks)

    async def _poll(self, queue: SqsQueue, limit: int) -> None:
        try:
            received = await queue.receive(
                limit,
                wait=self._wait,
                visibility=self._visibility,
                numbers=self._numbers,
            )
        except Exception as error:  # noqa: BLE001 (nobody awaits this task)
            self.failure = error
            self._wanted[queue] = 1
        else:
            self._holding.add(received)
            self.reclaimed += sum(item.came_again for item in received)
            wanted = self._wanted.get(queue, 1) + 1 if len(received) == limit else 1
            self._wanted[queue] = min(_MAX_POLLS, wanted)
        self.news.set()
