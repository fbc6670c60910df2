"""A source that reads Amazon SQS queues, which can be subscribed to SNS topics.

A heartbeat keeps the messages that a replica holds invisible to others; those of a dead
replica become visible when their visibility timeout ends. A FIFO queue keeps the order
of its groups, even across retries. SQS's receive count isn't used as a number of
attempts, because it says nothing about outcomes.
"""

import asyncio
import math
import time
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from typing import Any, Final, NamedTuple, Self
from uuid import UUID

from inbox.consuming.backlog import Backlog
from inbox.consuming.outcomes import Outcomes
from inbox.source import Abilities, Delivery, EntryDelivery
from inbox.sources.sqs.polls import Polls
from inbox.sources.sqs.queue import Received, SqsQueue, queue_names, settle
from outbox.bounded_dict import BoundedDict
from outbox.brokers.sqs.connection import BROKEN, SqsSettings, is_busy
from outbox.errors import BrokerUnavailableError

_CONNECTIONS: Final = 32
_BEATS: Final = 4
# Slightly more than half the timeout, so that no heartbeat comes just too early.
_HALF: Final = 0.55


class _Outcome(NamedTuple):
    item: Received
    visible_after: int | None
    """In seconds; None settles the message."""


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
        self._poll_interval = poll_interval.total_seconds()
        self._wait = int(options.wait.total_seconds())
        self._visibility = int(options.visibility.total_seconds())
        self._answer_timeout = answer_timeout.total_seconds()
        self._leave_timeout = leave_timeout.total_seconds()
        self._exit = AsyncExitStack()
        self._client: Any = None
        # In the order of their arrival.
        self._held: dict[Received, None] = {}
        # In a FIFO queue, a message that waits for its retry holds back later ones of
        # its group. SQS delivers several of them together, and they can't be returned
        # in order without counting another receive. So they wait here.
        self._backlog: Backlog[Received] = Backlog()
        self._polls = Polls(self._hold, wait=self._wait, visibility=self._visibility)
        self.abilities = Abilities()
        self._outcomes: Outcomes[_Outcome] = Outcomes(self._write)
        # Kept across receipt handles: SQS counts receives, whatever their outcome.
        self._failures: BoundedDict[UUID, int] = BoundedDict()
        self._changing = asyncio.Lock()

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
        try:
            self._client = await self._exit.enter_async_context(
                self._settings.client(
                    "sqs",
                    connections=_CONNECTIONS,
                    read_timeout=self._wait + self._answer_timeout,
                )
            )
            self._polls.queues = [
                await SqsQueue.find(self._client, name, self._settings)
                for name in self._names
            ]
        except BROKEN as error:
            await self._exit.aclose()
            if unusable := self._settings.unusable(error):
                raise unusable from None
            raise self._settings.unavailable(error) from error
        except BaseException:
            await self._exit.aclose()
            raise
        self._outcomes.start(self._beat())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Write the outcomes, and return all other messages to their queues."""
        async with AsyncExitStack() as leaving:
            leaving.push_async_callback(self._exit.aclose)
            leaving.push_async_callback(self._polls.cancel)
            # A task cancelled before its first step hasn't cleaned up.
            leaving.push_async_callback(self._outcomes.finish, 0)
            await asyncio.gather(
                self._polls.stop(), self._outcomes.finish(self._leave_timeout)
            )
            # If AWS is unavailable, the messages become visible later.
            with suppress(*BROKEN):
                async with asyncio.timeout(self._leave_timeout):
                    await self._give_back()

    async def receive(self, *, limit: int) -> Sequence[Delivery]:
        """Return new deliveries; SQS redelivers messages that a dead replica held."""
        await self._outcomes.check()
        until = time.monotonic() + self._poll_interval
        while True:
            self._polls.news.clear()
            taken = self._take(limit)
            failure = None if taken else self._polls.take_failure()
            if failure is not None:
                raise self._settings.unavailable(failure) from failure
            if len(taken) < limit:
                self._polls.start(limit)
            patience = until - time.monotonic()
            if taken or patience <= 0:
                return [self._delivery(item) for item in taken]
            await self._backlog.wait_for(self._polls.news, patience)

    def acked(self, item: Received) -> None:
        """Schedule the deletion of an item, within milliseconds."""
        item.settled = True
        self._failures.pop(item.message.id, None)
        self._outcomes.add(_Outcome(item, None))

    def nacked(self, item: Received, delay: timedelta | None) -> None:
        """Deliver an item again, at once or after the delay."""
        if delay is not None and item.key is None:
            self._failures[item.message.id] = item.attempts + 1
        if item not in self._held:
            return  # SQS redelivers it
        if delay is None:
            self._backlog.add(item)
            self._polls.news.set()
            return
        seconds = min(delay.total_seconds(), item.ours_until - time.monotonic())
        if item.key is not None:
            item.attempts += 1
            self._backlog.defer(item, seconds)
            self._polls.news.set()
        else:
            del self._held[item]
            self._outcomes.add(_Outcome(item, max(0, math.ceil(seconds))))

    def handed_back(self, item: Received, delay: timedelta) -> bool:
        """Make an item, with later ones of its group, visible after the delay."""
        seconds = min(delay.total_seconds(), item.ours_until - time.monotonic())
        for each in [other for other in self._held if _waits_for(other, item)]:
            del self._held[each]
            self._outcomes.add(_Outcome(each, max(0, math.ceil(seconds))))
        return True

    def _hold(self, received: Iterable[Received]) -> None:
        for item in received:
            self._held[item] = None
            self._backlog.add(item)

    def _lose(self, lost: Received) -> None:
        """Forget a lost message, and later ones that would overtake its redelivery."""
        self._held.pop(lost, None)
        if lost.key is None:
            return
        of_key = [item for item in self._held if item.key == lost.key]
        for item in of_key:
            if item.place > lost.place:
                del self._held[item]
        if all(item.place > lost.place for item in of_key):
            self._backlog.forget(lost.key)

    def _take(self, limit: int) -> list[Received]:
        taken: list[Received] = []
        while items := self._backlog.take(limit - len(taken)):
            for item in items:
                if item in self._held and item.until <= time.monotonic():
                    self._lose(item)
                if item in self._held:
                    taken.append(item)
        return taken

    def _delivery(self, item: Received) -> Delivery:
        known = self._failures.get(item.message.id) or 0
        item.attempts = max(item.attempts, known)
        return EntryDelivery(self, item, item)

    async def _write(self, outcomes: Sequence[_Outcome]) -> None:
        try:
            async with self._changing, asyncio.timeout(self._answer_timeout):
                failed = await settle(dict(outcomes))
        except BROKEN as error:
            raise self._settings.unavailable(error) from error
        if any(map(is_busy, failed.values())):
            raise BrokerUnavailableError(
                f"broker {self._settings.url} can't accept acknowledgements "
                "at the moment"
            )
        for item, seconds in outcomes:
            if seconds is None:
                self._held.pop(item, None)

    async def _give_back(self) -> None:
        left = dict(self._backlog.waiting())
        await settle(
            {
                item: max(0, math.ceil(left.get(item, 0)))
                for item in self._held
                if not item.settled
            }
        )

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._visibility / _BEATS)
            async with self._changing:
                half = time.monotonic() + self._visibility * _HALF
                due: dict[Received, int | None] = {
                    item: self._visibility
                    for item in self._held
                    if item.until < half and item.until < item.ours_until
                }
                with suppress(*BROKEN):
                    async with asyncio.timeout(self._answer_timeout):
                        for item, code in (await settle(due)).items():
                            if not is_busy(code):
                                self._lose(item)


def _waits_for(item: Received, first: Received) -> bool:
    is_later = item.key is not None and item.key == first.key
    return item is first or (is_later and item.place > first.place and not item.settled)
