"""The polls of the SQS source, without a server."""

from typing import Any, cast

from inbox.sources.sqs.holding import Holding
from inbox.sources.sqs.polls import Polls
from inbox.sources.sqs.queue import SqsQueue


class Queue:
    """A queue whose receives fail until it is told to answer, with no messages."""

    def __init__(self) -> None:
        self.answers = False

    async def receive(self, *_: Any, **__: Any) -> list[Any]:
        if not self.answers:
            raise ConnectionError("unreachable")
        return []


async def polled(polls: Polls) -> BaseException | None:
    polls.news.clear()
    polls.start(limit=10)
    await polls.news.wait()
    await polls.stop()
    return polls.take_failure()


async def test_a_failed_poll_is_reported_once() -> None:
    polls = Polls(Holding(), wait=0, visibility=30)
    polls.queues["orders"] = cast(SqsQueue, Queue())
    assert isinstance(await polled(polls), ConnectionError)
    assert polls.take_failure() is None


async def test_a_failure_is_forgotten_once_its_queue_answers() -> None:
    polls = Polls(Holding(), wait=0, visibility=30)
    queue = Queue()
    polls.queues["orders"] = cast(SqsQueue, queue)
    polls.start(limit=10)
    await polls.news.wait()
    await polls.stop()
    queue.answers = True
    assert await polled(polls) is None


async def test_a_queue_that_answers_does_not_hide_one_that_fails() -> None:
    polls = Polls(Holding(), wait=0, visibility=30)
    good, bad = Queue(), Queue()
    good.answers = True
    polls.queues["bad"] = cast(SqsQueue, bad)
    polls.queues["good"] = cast(SqsQueue, good)
    assert isinstance(await polled(polls), ConnectionError)
