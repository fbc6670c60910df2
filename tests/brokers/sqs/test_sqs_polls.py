"""The polls of the SQS source, without a server."""

import asyncio
from typing import Any, cast

from pillarbox.inbox.sources.sqs.polls import Polls
from pillarbox.inbox.sources.sqs.queue import SqsQueue


class Queue:
    """A queue whose receives fail until it is told to answer, with no messages."""

    def __init__(self) -> None:
        self.answers = False

    async def receive(self, *_: Any, **__: Any) -> list[Any]:
        if not self.answers:
            raise LookupError("a fault of the reader")
        return []


async def poll(polls: Polls, news: asyncio.Event) -> None:
    news.clear()
    polls.start(limit=10)
    await news.wait()
    await polls.stop()


async def test_a_failed_poll_is_reported_once_or_until_its_queue_answers() -> None:
    news = asyncio.Event()
    polls = Polls(lambda _: None, news, wait=0, visibility=30)
    good, bad = Queue(), Queue()
    good.answers = True
    polls.queues = [cast(SqsQueue, bad), cast(SqsQueue, good)]
    await poll(polls, news)
    assert isinstance(polls.take_failure(), LookupError)
    assert polls.take_failure() is None
    await poll(polls, news)
    bad.answers = True
    await poll(polls, news)
    assert polls.take_failure() is None
