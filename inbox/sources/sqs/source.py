"""A source that reads Amazon SQS queues, which can be subscribed to SNS topics.

A heartbeat keeps the messages that a replica holds invisible to others; those of a dead
replica become visible when their visibility timeout ends. A FIFO queue keeps the order
of its groups, even across retries. SQS's receive count isn't used as a number of
attempts, because it says nothing about outcomes.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any, Final, Self
from uuid import UUID

from pillarbox.inbox.consuming.backlog import READ_AHEAD
from pillarbox.inbox.consuming.keeper import Keeper, Outcome
from pillarbox.inbox.source import Abilities, Delivery, EntryDelivery
from pillarbox.inbox.sources.sqs.polls import Polls
from pillarbox.inbox.sources.sqs.queue import (
    MAX_RECEIVED,
    Received,
    SqsQueue,
    queue_names,
    settle,
)
from pillarbox.outbox.bounded_dict import BoundedDict
from pillarbox.outbox.brokers.sqs.connection import BROKEN, SqsSettings, is_busy
from pillarbox.outbox.errors import BrokerUnavailableError

_CONNECTIONS: Final = 32
_BEATS: Final = 4
# Slightly more than half the timeout, so that no heartbeat comes just too early.
_HALF: Final = 0.55
# Others can receive what isn't held here, so no more is read ahead than is soon done.
_SOON: Final = 5.0


class SqsSource:
    """A source of the messages in one consumer's queues.

    Args:
        settings: the settings from a URL.
        consumer: the consumer's name, which can be part of the queues' names.
        topics: names of topics, or, if one queue serves all, prefixes followed by `*`.
        poll_interval: how long `receive` waits.
        answer_timeout: how long to wait for AWS to respond, in addition to `wait`.
        leave_timeout: how long leaving waits for the outcomes to be written, and then
            for the other messages to be returned.

    Raises:
        ConfigError: these arguments don't yield valid queue names.
    """

    messaging_system: Final = "aws_sqs"

    def __init__(
        self,
        settings: SqsSettings,
        *,
        consumer: str,
        topics: Sequence[str],
        poll_interval: timedelta = timedelta(seconds=1),
        answer_timeout: timedelta = timedelta(seconds=10),
        leave_timeout: timedelta = timedelta(seconds=10),
    ) -> None:
        options = settings.options
        self._settings = settings
        self._names = queue_names(options.queue, settings, consumer, topics)
        self._topics = topics
        self._poll_interval = poll_interval.total_seconds()
        self._wait = int(options.wait.total_seconds())
        self._visibility = int(options.visibility.total_seconds())
        self._answer_timeout = answer_timeout.total_seconds()
        self._leave_timeout = leave_timeout.total_seconds()
        self._exit = AsyncExitStack()
        # In a FIFO queue, a message that waits for its retry holds back later ones of
        # its group. SQS delivers several of them together, and they can't be returned
        # in order without counting another receive. So they wait here.
        self._keeper: Keeper[Received] = Keeper(
            self._write, self._extend, pause=lambda: self._visibility / _BEATS
        )
        self._polls = Polls(
            self._hold,
            self._keeper.news,
            wait=self._wait,
            visibility=self._visibility,
        )
        self.abilities = Abilities(pauses=self._know_pauses)
        # Kept across receipt handles: SQS counts receives, whatever their outcome.
        self._failures: BoundedDict[UUID, int] = BoundedDict()
        self._acked: deque[float] = deque(maxlen=READ_AHEAD)

    @classmethod
    def from_url(cls, url: str, *, consumer: str, topics: Sequence[str]) -> Self:
        """Create a source from `sqs://region/?option=…` or `sns://region/?option=…`.

        With `sns://`, each consumer has its own queue for a topic.

        Raises:
            ConfigError: the URL can't be used.
        """
        return cls(SqsSettings.from_url(url), consumer=consumer, topics=topics)

    async def __aenter__(self) -> Self:
        """Find the queues.

        Raises:
            BrokerUnavailableError: AWS is unreachable.
            ConfigError: a queue is missing, or credentials or region are missing or
                wrong.
        """
        await self._settings.open(
            self._exit,
            self._find,
            service="sqs",
            connections=_CONNECTIONS,
            read_timeout=self._wait + self._answer_timeout,
        )
        self._keeper.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Write the outcomes, and return all other messages to their queues."""
        async with AsyncExitStack() as leaving:
            leaving.push_async_callback(self._exit.aclose)
            leaving.push_async_callback(self._polls.cancel)
            # A task cancelled before its first step hasn't cleaned up.
            leaving.push_async_callback(self._keeper.end)
            await self._polls.stop()
            await self._keeper.leave(self._leave_timeout, self._give_back)

    async def receive(self, *, limit: int) -> Sequence[Delivery]:
        """Return new deliveries; SQS redelivers messages that a dead replica held."""
        keeper = self._keeper
        await keeper.check()
        until = time.monotonic() + self._poll_interval
        while True:
            keeper.news.clear()
            taken = keeper.take(limit)
            failure = None if taken else self._polls.take_failure()
            if failure is not None:
                raise self._settings.unavailable(failure) from failure
            if len(taken) < limit:
                self._polls.start(limit)
            elif self._room:
                self._polls.start(MAX_RECEIVED)
            patience = until - time.monotonic()
            if taken or patience <= 0:
                return [EntryDelivery(self, item, item) for item in taken]
            await keeper.backlog.wait_for(keeper.news, patience)

    def acked(self, item: Received) -> None:
        """Schedule the deletion of an item, within milliseconds."""
        self._failures.pop(item.message.id, None)
        self._acked.append(time.monotonic())
        self._keeper.acked(item)

    def nacked(self, item: Received, delay: timedelta | None) -> None:
        """Deliver an item again, at once or after the delay."""
        if delay is not None:
            self._failures[item.message.id] = item.attempts + 1
            delay = min(delay, timedelta(seconds=item.ours_until - time.monotonic()))
        if delay is not None and item.key is None:
            self._keeper.handed_back(item, delay)
        else:
            self._keeper.nacked(item, delay)

    def handed_back(self, item: Received, delay: timedelta) -> bool:
        """Make an item, with later ones of its group, visible after the delay."""
        for other in list(self._keeper.held.values()):
            is_of_group = item.key is not None and other.key == item.key
            if other is item or (is_of_group and other.place > item.place):
                self._keeper.handed_back(other, delay)
        return True

    def _know_pauses(self, is_paused: Callable[[str], bool]) -> bool:
        has_prefix = any(topic.endswith("*") for topic in self._topics)
        if has_prefix or len(self._names) < len(self._topics):
            return False  # a queue has several topics
        topics = dict(zip(self._names, self._topics, strict=True))
        self._polls.is_paused = lambda queue: is_paused(topics[queue.name])
        return self._keeper.backlog.leave_out_paused(is_paused)

    @property
    def _room(self) -> bool:
        """Whether it can read ahead: no more than it has acked in the last seconds."""
        while self._acked and self._acked[0] < time.monotonic() - _SOON:
            self._acked.popleft()
        backlog = self._keeper.backlog
        return bool(backlog.room) and len(backlog) < len(self._acked)

    async def _find(self, client: Any) -> None:
        self._polls.queues = [
            await SqsQueue.find(client, name, self._settings) for name in self._names
        ]

    def _hold(self, received: Sequence[Received]) -> None:
        for item in received:
            item.attempts = self._failures.get(item.message.id, 0)
        self._keeper.hold(received)

    async def _write(self, outcomes: Sequence[Outcome[Received]]) -> None:
        failed = await self._settle(dict(outcomes))
        if any(map(is_busy, failed.values())):
            raise BrokerUnavailableError(
                f"broker {self._settings.url} can't accept acknowledgements "
                "at the moment"
            )

    async def _extend(self, items: Sequence[Received]) -> Iterable[Received]:
        half = time.monotonic() + self._visibility * _HALF
        due = [item for item in items if item.until < min(half, item.ours_until)]
        failed = await self._settle(dict.fromkeys(due, self._visibility))
        return [item for item, code in failed.items() if not is_busy(code)]

    async def _give_back(self, items: dict[Received, float]) -> None:
        await self._settle(items)

    async def _settle(
        self, outcomes: Mapping[Received, float | None]
    ) -> dict[Received, str]:
        try:
            async with asyncio.timeout(self._answer_timeout):
                return await settle(outcomes)
        except BROKEN as error:
            raise self._settings.unavailable(error) from error
