"""The polls that wait for messages from Amazon SQS, each in a task of its own.

They don't run inside `receive`: if it were cancelled, messages that SQS had just
delivered would stay invisible until their visibility timeout ends. Each queue has one
poll, and gets more while its polls return the maximum number of messages.
"""

import asyncio
from collections.abc import Callable, Sequence
from itertools import count, filterfalse
from typing import Final

from pillarbox.inbox.sources.sqs.queue import MAX_RECEIVED, Received, SqsQueue
from pillarbox.outbox.gather import end

_MAX_POLLS: Final = 4
# A message that arrives at an abandoned poll stays invisible until its visibility
# timeout ends.
_LAST_POLL: Final = 2.0


class Polls:
    """Polls queues. For one event loop.

    Args:
        hold: called with the messages of each poll.
        news: set when a poll has ended.
        wait, visibility: SQS's wait time and visibility timeout, in seconds.

    Attributes:
        queues: the queues to poll.
        is_paused: whether the topic of a queue is paused: it isn't polled then.
    """

    def __init__(
        self,
        hold: Callable[[Sequence[Received]], None],
        news: asyncio.Event,
        *,
        wait: int,
        visibility: int,
    ) -> None:
        self.queues: list[SqsQueue] = []
        self.is_paused: Callable[[SqsQueue], bool] = lambda _: False
        self._hold = hold
        self._news = news
        self._wait = wait
        self._visibility = visibility
        self._numbers = count()
        self._tasks: dict[asyncio.Task[None], SqsQueue] = {}
        self._wanted: dict[SqsQueue, int] = {}
        self._failures: dict[SqsQueue, BaseException] = {}

    def start(self, limit: int) -> None:
        """Start as many polls as the queues seem to need."""
        at_work = list(self._tasks.values())
        for queue in filterfalse(self.is_paused, self.queues):
            for _ in range(self._wanted.get(queue, 1) - at_work.count(queue)):
                task = asyncio.create_task(self._poll(queue, min(limit, MAX_RECEIVED)))
                self._tasks[task] = queue
                task.add_done_callback(self._tasks.pop)

    def take_failure(self) -> BaseException | None:
        """Return why a queue's last poll failed, and forget it; None if none did."""
        for queue in self._failures:
            return self._failures.pop(queue)
        return None

    async def stop(self) -> None:
        """Wait briefly for running polls to end, then cancel them."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_LAST_POLL)
        await self.cancel()

    async def cancel(self) -> None:
        """Cancel all polls; what they were about to receive is redelivered later."""
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
            self._failures[queue] = error
            self._wanted[queue] = 1
        else:
            self._failures.pop(queue, None)
            self._hold(received)
            wanted = self._wanted.get(queue, 1) + 1 if len(received) == limit else 1
            self._wanted[queue] = min(_MAX_POLLS, wanted)
        self._news.set()
