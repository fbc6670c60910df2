"""A source that reads NATS JetStream through durable pull consumers.

One replica at a time reads a topic, see `generations`, so that keys stay in order. If
the source is shared, JetStream delivers messages to any replica that asks, and those
that a dead one held are redelivered when `ack_wait` ends. Heartbeats keep messages with
the replica that holds them, and a message that waits for its retry holds back its key
here.
"""

import asyncio
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from typing import Any, Final, Self

from nats.aio.msg import Msg

from inbox.consuming.keeper import Keeper, Outcome
from inbox.consuming.rollout import begins_at_oldest
from inbox.source import Abilities, Delivery, EntryDelivery
from inbox.sources.nats.durable import NANOSECONDS, Entry, find_durables
from inbox.sources.nats.generations import Generations
from inbox.sources.nats.pull import ACKS, Pulls, settle
from outbox.brokers.nats.connection import NatsConnection, NatsLink, nats_errors
from outbox.brokers.nats.options import NAME_FORM, is_name
from outbox.brokers.nats.settings import NatsSettings
from outbox.errors import BrokerUnavailableError, ConfigError, shorten
from outbox.retry import jittered

_DEFAULT: Final = {
    "ack_policy": "explicit",
    "ack_wait": 30 * NANOSECONDS,
    "max_deliver": -1,
    "max_ack_pending": 10_000,
}
_RIGHTS: Final = ("NAMES", "DELETE", "DURABLE.CREATE")
_LAST_WRITE: Final = 5.0
_BEATS: Final = 3


class NatsSource:
    """A source of the messages in one consumer's topics, from the oldest on.

    The replica that holds a message counts its failed attempts, because NATS counts
    deliveries, whatever their reason.

    Args:
        url: `nats://` or `tls://`, with the options of `NatsOptions`.
        consumer: the prefix of the durables' names.
        topics: subjects, or prefixes followed by `.*`.
        poll_interval: the maximum wait of one pull; each pull's wait is jittered.

    Settings that the URL doesn't give stay unchanged in an existing durable; a new one
    gets an `ack_wait` of 30 s, no limit on deliveries and a `max_ack_pending` of
    10,000.
    """

    def __init__(
        self,
        url: str,
        *,
        consumer: str,
        topics: Sequence[str],
        poll_interval: timedelta = timedelta(seconds=1),
    ) -> None:
        self._settings = NatsSettings.from_url(url)
        if not is_name(consumer):
            raise ConfigError(f"consumer {shorten(consumer)}: write {NAME_FORM}")
        self._consumer = consumer
        self._topics = tuple(topics)
        self._poll = poll_interval.total_seconds()
        options = self._settings.options
        self._wanted: dict[str, Any] = {
            name: value
            for name in ("max_deliver", "max_ack_pending")
            if (value := getattr(options, name)) is not None
        }
        if options.ack_wait is not None:
            self._wanted["ack_wait"] = int(
                options.ack_wait.total_seconds() * NANOSECONDS
            )
        self._warnings: list[str] = []
        self._is_shared = False
        self._denied = False
        self.abilities = Abilities(
            warnings=lambda: self._warnings,
            share=self._share,
            standing_by=self._standing_by,
        )
        self._link = NatsLink(
            settings=self._settings,
            owner="source",
            prepare=self._prepare,
            on_lost=lambda _: self._keeper.news.set(),
            on_refusal=self._refused,
        )
        self._pulls: Pulls | None = None
        self._refusal: str | None = None
        self._keeper: Keeper[Entry] = Keeper(
            self._write, self._extend, pause=lambda: self._opened.ack_wait / _BEATS
        )

    async def __aenter__(self) -> Self:
        """Connect; create or update the durables.

        Raises:
            BrokerUnavailableError: NATS is unreachable, or rejects the connection.
            ConfigError: no stream captures a topic, or a durable isn't a pull consumer
                with explicit acks.
        """
        await self._link.open()
        self._keeper.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Write the acks, and return all other messages to the stream."""
        async with AsyncExitStack() as leaving:
            leaving.push_async_callback(self._link.close)
            leaving.push_async_callback(self._keeper.end)
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WRITE):
                    # A pull can't be cancelled, so wait for its messages.
                    while self._opened.is_open:
                        self._keeper.news.clear()
                        await self._keeper.news.wait()
                    await self._keeper.leave(_LAST_WRITE, self._give_back)

    async def receive(self, *, limit: int) -> Sequence[Delivery]:
        """Return new deliveries, and delayed ones that are due."""
        await self._keeper.check()
        with nats_errors(self._settings):
            connection = await self._link.connected()
            backlog = self._keeper.backlog
            room = backlog.room if self._generations is not None else 0
            if room and backlog.ready:
                await self._opened.ask(room, self._poll)
            entries = self._keeper.take(limit)
            if not entries:
                await self._fetch(connection, max(limit, room))
                entries = self._keeper.take(limit)
        return [EntryDelivery(self, entry, entry) for entry in entries]

    def acked(self, entry: Entry) -> None:
        """Schedule the ack of an entry."""
        self._keeper.acked(entry)

    def nacked(self, entry: Entry, delay: timedelta | None) -> None:
        """Return an entry to its place in the order, or delay it."""
        self._keeper.nacked(entry, delay)

    def handed_back(self, entry: Entry, delay: timedelta) -> bool:
        """Return an entry to the broker, or leave its topic to another replica.

        If no other replica is there, the entry and its key wait here.
        """
        if self._generations is None:
            return self._keeper.handed_back(entry, delay)
        durable = self._opened.durables[entry.line]
        durable.aside_until = time.monotonic() + delay.total_seconds()
        return self._keeper.kept_back(entry, delay)

    def _share(self) -> None:
        self._is_shared = True

    def _standing_by(self) -> Collection[str]:
        return self._generations.elsewhere if self._generations is not None else ()

    @property
    def _generations(self) -> Generations | None:
        return self._pulls.generations if self._pulls is not None else None

    @property
    def _opened(self) -> Pulls:
        assert self._pulls is not None, "use `async with`"
        return self._pulls

    async def _fetch(self, connection: NatsConnection, limit: int) -> None:
        keeper, pulls = self._keeper, self._opened
        keeper.news.clear()
        poll = jittered(self._poll)
        if pulls.generations is not None:
            if self._denied:
                await self._begin(pulls, None)
            elif left := await pulls.generations.look():
                keeper.forget_waiting(lambda entry: entry.line in left)
        await pulls.ask(limit, poll)
        await keeper.backlog.wait_for(keeper.news, poll)
        if pulls.is_overdue:
            await connection.drop("it doesn't answer")
        await self._check(connection)

    async def _on_message(self, got: Msg) -> None:
        if self._pulls is not None and (entry := await self._pulls.read(got)):
            if (held := self._keeper.held.get(entry.at)) is not None:
                # The message or a heartbeat was late; this replica still holds it.
                held.reply = entry.reply
            self._keeper.hold([entry])
        self._keeper.news.set()

    async def _write(self, outcomes: Sequence[Outcome[Entry]]) -> None:
        with nats_errors(self._settings):
            connection = await self._link.connected()
            await settle(connection, outcomes)
            # NATS reports refused acks before it answers the flush.
            await self._check(connection)

    async def _extend(self, entries: Sequence[Entry]) -> Iterable[Entry]:
        with nats_errors(self._settings):
            # Whoever handles long receives nothing meanwhile, so this reconnects, too.
            client = (await self._link.connected()).client
            for entry in entries:
                await client.publish(entry.reply, b"+WPI")
        return ()

    async def _give_back(self, entries: dict[Entry, float]) -> None:
        with nats_errors(self._settings):
            connection = self._opened.connection
            if connection.lost is None:
                if self._generations is None:
                    await settle(connection, entries.items())
                else:
                    await self._generations.leave()

    async def _prepare(self, connection: NatsConnection) -> None:
        self._refusal = None
        durables = await find_durables(
            connection, self._consumer, self._topics, self._settings.options.stream
        )
        for durable in durables:
            durable.set_limits({**_DEFAULT, **self._wanted})
        pulls = Pulls(connection, self._settings.api, durables)
        await pulls.listen(self._on_message)
        last, self._pulls = self._pulls, pulls
        try:
            old = await self._begin(pulls, last)
        except BrokerUnavailableError:
            if not self._denied:
                raise
            old = await self._begin(pulls, last)
        if old:
            self._warnings.append(begins_at_oldest(self._consumer, old))

    async def _begin(self, pulls: Pulls, last: Pulls | None) -> int:
        connection, durables = pulls.connection, [*pulls.durables.values()]
        if self._is_shared or self._denied:
            pulls.generations = None
            return sum(
                [await d.join(connection, self._wanted, _DEFAULT) for d in durables]
            )
        pulls.generations = Generations(
            connection, pulls.durables, pulls.inbox, self._wanted, _DEFAULT
        )
        own = last.durables.values() if last else ()
        return await pulls.generations.begin({d.place for d in own if d.is_read})

    async def _check(self, connection: NatsConnection) -> None:
        """Raise why the connection can't be used, if it can't."""
        if self._refusal is not None:
            await connection.drop(
                f"{self._refusal}; grant the user publish on {ACKS}>, or every message "
                "is redelivered"
            )
        if connection.lost is not None:
            raise connection.lost

    def _refused(self, text: str) -> None:
        api = f"{self._settings.api}.CONSUMER"
        # The text is in lower case and names the subject of one ack.
        if f'"{ACKS.lower()}' in text:
            self._refusal = text
            self._keeper.news.set()
        elif any(f"{api}.{what}.".lower() in text for what in _RIGHTS):
            if not self._denied and not self._is_shared:
                self._warnings.append(
                    f"{text}: so all replicas receive at the same time, and keys may "
                    f"get out of order; grant the user publish on {api}.>"
                )
            self._denied = True
