"""A source that reads the outbox itself, in the database of the writers.

Between the commit and the handler there is no relay process and no copy of the message:
the consumer is a reader of the outbox, and this source runs a relay that hands messages
to its own process. So it claims, orders, defers and takes lanes over as all relays do.
Each lane has a batch of its own, which ends when the last of its messages is settled.
"""

import asyncio
import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple, Self, TypeAlias

from inbox.consuming.rollout import warn_unhandled
from inbox.poison.history import (
    FIRST_DELIVERY,
    REDELIVERED,
    History,
    TakenOver,
    Takeover,
)
from inbox.source import Abilities, Arrived, Delivery, EntryDelivery
from outbox.brokers.options import DIRECT
from outbox.brokers.postgres import PostgresOptions
from outbox.errors import BrokerUnavailableError, DatabaseUnavailableError
from outbox.events import Event
from outbox.gather import end, start
from outbox.lane import LANES, lane_of
from outbox.message import Message
from outbox.payload.payload_codec import load_codec
from outbox.postgres.connection import connect
from outbox.url import without_password
from relay.config import RelayConfig
from relay.events import (
    BrokerDiffers,
    BrokerMatches,
    DatabaseLost,
    DatabaseRecovered,
    LeaseTaken,
    ReaderDropped,
    RelayStarted,
)
from relay.publisher import Acked, Confirmation, Nacked
from relay.reader import RelayReader
from relay.relay import Relay

_MAX_SUSPECTS: Final = 256
"""For each lane that this replica takes over."""
_CONNECTIONS: Final = 3
_SHARE: Final = 8
"""Of what may be prefetched, one part is in each batch."""
_MAX_BATCH_BYTES: Final = 1024 * 1024
"""Of one batch; a larger message is a batch of its own."""
_TO_END: Final = "only pillarbox readers drop ends that, for all topics of the reader"
_NEVER: Final = timedelta(days=365)
"""Handlers have limits of their own."""

_Answer: TypeAlias = "asyncio.Future[Confirmation | None]"
"""None: the message was not started."""


class _Handed(NamedTuple):
    """A message that the relay waits for, and how often it has failed."""

    message: Message
    attempts: int
    created_at: datetime
    answer: _Answer


class _Handover:
    """What the relay publishes to: messages wait here until they are settled."""

    identity = DIRECT

    def __init__(self) -> None:
        self.ready: deque[_Handed] = deque()
        self.some = asyncio.Event()
        self._open: set[_Answer] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass

    async def hand_over(
        self,
        batch: Sequence[Message],
        attempts: Sequence[int],
        created_at: Sequence[datetime],
    ) -> Sequence[Confirmation | None]:
        loop = asyncio.get_running_loop()
        answers: list[_Answer] = [loop.create_future() for _ in batch]
        self._open.update(answers)
        self.ready.extend(map(_Handed, batch, attempts, created_at, answers))
        self.some.set()
        try:
            return await asyncio.gather(*answers)
        finally:
            self._open.difference_update(answers)

    def take(self, limit: int) -> list[_Handed]:
        """Hand out messages whose batch hasn't been cancelled."""
        taken: list[_Handed] = []
        while self.ready and len(taken) < limit:
            handed = self.ready.popleft()
            if not handed.answer.done():
                taken.append(handed)
        if not self.ready:
            self.some.clear()
        return taken

    def give_back(self) -> None:
        """Settle what is open as not started."""
        self.ready.clear()
        for answer in list(self._open):
            _settle(answer, None)


class DirectSource:
    """A source of one consumer's messages in the outbox; its replicas share them.

    Args:
        url: the URL of the outbox's database, with `direct=true`.
        consumer: the consumer's name, and that of its reader: see `pillarbox readers`.
        topics: the topics that it handles, which are added to the reader's.
        poll_interval: the maximum wait unless woken.
        leave_timeout: how long leaving waits for the outcomes to be written.
    """

    def __init__(
        self,
        url: str,
        *,
        consumer: str,
        topics: Sequence[str],
        poll_interval: timedelta = timedelta(seconds=1),
        leave_timeout: timedelta = timedelta(seconds=10),
    ) -> None:
        url, options = PostgresOptions.parse(url)
        codec = os.environ.get("PILLARBOX_CODEC")
        self._warnings: list[str] = []
        self.abilities = Abilities(warnings=lambda: self._warnings)
        self._url = url
        self._topics = topics
        self._poll = poll_interval.total_seconds()
        self._handover = _Handover()
        self._started = asyncio.Event()
        self._failure: str | None = None
        self._refusal: str | None = None
        self._taken_over: dict[int, Takeover] = {}
        self._running: asyncio.Task[None] | None = None
        self._reader = RelayReader(consumer, DIRECT, self._handover)
        self._relay = Relay(
            url,
            self._handover,
            RelayConfig(
                # A batch of each lane: none waits for the handlers of another.
                concurrency=LANES,
                batch_size=max(1, options.prefetch // _SHARE),
                max_batch_bytes=_MAX_BATCH_BYTES,
                lease=options.lease,
                poll_interval=poll_interval,
                publish_timeout=_NEVER,
                drain=leave_timeout,
                codec=load_codec(codec) if codec else None,
            ),
            observers=[self._on_event],
            reader=consumer,
            topics=topics,
            broker=DIRECT,
            connections=_CONNECTIONS,
        )

    async def __aenter__(self) -> Self:
        """Add the topics to the consumer's reader; lease lanes, as a relay does.

        Raises:
            BrokerUnavailableError: the database is unreachable, or read-only.
            ConfigError: the reader of this name belongs to relays, or discards its
                messages; the role isn't a member of pillarbox_relay; or the URL leads
                through a pooler.
        """
        try:
            self._running = await start(self._relay.run(), self._started)
            await self._check_topics()
        except DatabaseUnavailableError as error:
            await self.__aexit__()
            raise self._away(str(error)) from error
        except BaseException:
            await self.__aexit__()
            raise
        self._running.add_done_callback(lambda _: self._handover.some.set())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Return what is not settled, write the outcomes, and release the lanes."""
        running, self._running = self._running, None
        if running is None:
            return
        self._relay.stop()
        while not running.done():
            self._handover.give_back()
            await asyncio.wait({running}, timeout=0.05)
        with suppress(Exception):
            await running
        await end([running])

    async def _check_topics(self) -> None:
        async with await connect(
            self._url, application_name="pillarbox inbox"
        ) as connection:
            record = await self._reader.read(connection)
        self._warnings = warn_unhandled(record.topics or (), self._topics, _TO_END)

    async def receive(self, *, limit: int) -> Sequence[Delivery]:
        """Return messages that the relay has claimed.

        Raises:
            BrokerUnavailableError: the database is unavailable, or the reader was
                dropped or given to relays.
        """
        if not (self._handover.ready or self._failure or self._refusal):
            with suppress(TimeoutError):
                async with asyncio.timeout(self._poll):
                    await self._handover.some.wait()
        taken = self._handover.take(limit)
        if not taken:
            assert self._running is not None
            if self._running.done():
                self._running.result()
            if failure := self._refusal or self._failure:
                raise self._away(failure)
        return [
            EntryDelivery(
                self,
                handed.answer,
                Arrived(
                    message=handed.message,
                    attempts=handed.attempts,
                    history=self._history_of(handed),
                    published_at=handed.created_at.timestamp(),
                ),
            )
            for handed in taken
        ]

    def acked(self, entry: _Answer) -> None:
        """Settle a message."""
        _settle(entry, Acked())

    def nacked(self, entry: _Answer, delay: timedelta | None) -> None:
        """Make a message claimable again: at once or, with its key, after a delay."""
        _settle(
            entry,
            None
            if delay is None
            else Nacked("its handler failed", retry_after=delay, is_attempt=True),
        )

    def handed_back(self, entry: _Answer, delay: timedelta) -> bool:
        """Let a message and its key wait, and others lease its lane meanwhile."""
        _settle(entry, Nacked("has no handler here", retry_after=delay))
        self._relay.step_aside(delay.total_seconds())
        return True

    def _history_of(self, handed: _Handed) -> History:
        message = handed.message
        lane = lane_of(message.key, message.id, message.priority)
        taken_over = self._taken_over.get(lane)
        if taken_over is not None and taken_over.covers(handed.created_at):
            return taken_over.history
        return REDELIVERED if handed.attempts else FIRST_DELIVERY

    def _on_event(self, event: Event) -> None:
        match event:
            case RelayStarted():
                self._started.set()
            case LeaseTaken(lanes=lanes):
                now = datetime.now(UTC)
                self._taken_over |= {
                    lane: Takeover(now, TakenOver(_MAX_SUSPECTS)) for lane in lanes
                }
            case DatabaseLost():
                self._failure = event.reason
            case DatabaseRecovered():
                self._failure = None
            case ReaderDropped():
                self._refusal = f"reader {event.reader} was dropped"
            case BrokerDiffers():
                self._refusal = f"its relays publish to {event.recorded}"
            case BrokerMatches():
                self._refusal = None

    def _away(self, reason: str) -> BrokerUnavailableError:
        return BrokerUnavailableError(f"{without_password(self._url)}: {reason}")


def _settle(answer: _Answer, confirmation: Confirmation | None) -> None:
    if not answer.done():
        answer.set_result(confirmation)
