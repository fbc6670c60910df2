"""A source that reads NATS JetStream through durable pull consumers.

One replica at a time reads a topic, or a shard of it, see `replicas`, so that keys stay
in order. If the source is shared, JetStream delivers messages to any replica that asks,
and those that a dead one held are redelivered when `ack_wait` ends. Heartbeats keep
messages with the replica that holds them, and a message that waits for its retry blocks
its key in this process.
"""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from typing import Any, Final, Self

from nats.aio.msg import Msg

from pillarbox.inbox.consuming.keeper import Keeper, Outcome
from pillarbox.inbox.consuming.rollout import begins_at_oldest
from pillarbox.inbox.source import Abilities, Delivery, EntryDelivery
from pillarbox.inbox.sources.nats.durable import NANOSECONDS, Entry, find_durables
from pillarbox.inbox.sources.nats.pull import ACKS, Pulls, settle
from pillarbox.inbox.sources.nats.replicas import READS, Replicas
from pillarbox.outbox.brokers.nats.connection import (
    NatsConnection,
    NatsLink,
    nats_errors,
)
from pillarbox.outbox.brokers.nats.message import OF_CONSUMER
from pillarbox.outbox.brokers.nats.options import NAME_FORM, is_name
from pillarbox.outbox.brokers.nats.settings import NatsSettings
from pillarbox.outbox.errors import BrokerUnavailableError, ConfigError, shorten
from pillarbox.outbox.retry import jittered

_DEFAULT: Final = {
    "ack_policy": "explicit",
    "ack_wait": 30 * NANOSECONDS,
    "max_deliver": -1,
    "max_ack_pending": 10_000,
}
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
        self._wanted: dict[str, Any] = {"description": f"{OF_CONSUMER}{consumer}"} | {
            name: value
            for name in ("max_deliver", "max_ack_pending")
            if (value := getattr(options, name)) is not None
        }
        if options.ack_wait is not None:
            self._wanted["ack_wait"] = int(
                options.ack_wait.total_seconds() * NANOSECONDS
            )
        self._warnings: list[str] = []
        self._replicas = Replicas(
            consumer,
            self._wanted,
            _DEFAULT,
            on_taken=self._taken,
            on_left=lambda left: self._keeper.forget(lambda it: it.line == left.line),
        )
        self._keeper: Keeper[Entry] = Keeper(
            self._write, self._extend, pause=lambda: self._replicas.ack_wait / _BEATS
        )
        self.abilities = Abilities(
            leave_out=self._keeper.backlog.leave_out,
            warnings=lambda: self._warnings,
            share=self._share,
            standing_by=lambda: self._replicas.elsewhere,
            pauses=self._keeper.backlog.leave_out_paused,
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

    async def __aenter__(self) -> Self:
        """Connect; create or update the durables.

        Raises:
            BrokerUnavailableError: NATS is unreachable, or rejects the connection.
            ConfigError: no stream captures a topic, a durable isn't a pull consumer
                with explicit acks, or the user lacks a right.
        """
        try:
            await self._link.open()
        except BrokerUnavailableError as error:
            if self._refusal is None:
                raise
            raise ConfigError(self._refusal) from error
        self._keeper.start(self._replicas.run())
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
            room = 0 if self._replicas.is_shared else backlog.room
            # Each durable has a pull of its own.
            room = -(-room // max(1, len(self._opened.reading)))
            if room and backlog.due:
                await self._opened.ask(room, self._poll)
            entries = self._keeper.take(limit)
            if not entries:
                # If it holds only what is left out, it reads ahead no further.
                await self._fetch(connection, 0 if backlog.due else max(limit, room))
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
        if self._replicas.is_shared:
            return self._keeper.handed_back(entry, delay)
        self._replicas.step_aside(entry.line, delay.total_seconds())
        return self._keeper.kept_back(entry, delay)

    def _share(self) -> None:
        self._replicas.is_shared = True

    def _taken(self, old: int) -> None:
        if old:
            self._warnings.append(begins_at_oldest(self._consumer, old))
        self._keeper.news.set()

    @property
    def _opened(self) -> Pulls:
        assert self._pulls is not None, "use `async with`"
        return self._pulls

    async def _fetch(self, connection: NatsConnection, limit: int) -> None:
        keeper, pulls = self._keeper, self._opened
        keeper.news.clear()
        poll = keeper.backlog.patience(jittered(self._poll))
        if limit:
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
            connection, held = await self._link.connected(), self._keeper.held
            own = [it for it in outcomes if held.get(it.entry.at) is it.entry]
            await settle(connection, own)
            # NATS reports refused acks before it answers the flush.
            await self._check(connection)

    async def _extend(self, entries: Sequence[Entry]) -> Iterable[Entry]:
        with nats_errors(self._settings):
            # During long handlers nothing is received, so this reconnects, too.
            client = (await self._link.connected()).client
            for entry in entries:
                await client.publish(entry.reply, b"+WPI")
        return ()

    async def _give_back(self, entries: dict[Entry, float]) -> None:
        with nats_errors(self._settings):
            connection = self._opened.connection
            if connection.lost is None:
                if self._replicas.is_shared:
                    await settle(connection, entries.items())
                await self._replicas.leave(self._opened)
                await connection.flush()

    async def _prepare(self, connection: NatsConnection) -> None:
        self._refusal = None
        durables = await find_durables(
            connection, self._consumer, self._topics, self._settings.options.stream
        )
        self._pulls = Pulls(
            connection,
            self._settings.api,
            self._replicas.wake,
            self._keeper.backlog.is_paused,
        )
        await self._pulls.listen(self._on_message)
        await self._replicas.begin(self._pulls, durables)

    async def _check(self, connection: NatsConnection) -> None:
        """Raise why the connection can't be used, if it can't."""
        if self._refusal is not None:
            await connection.drop(self._refusal)
        if connection.lost is not None:
            raise connection.lost

    def _refused(self, text: str) -> None:
        api = f"{self._settings.api}.>"
        self._refusal = (
            f"{text}; grant the user publish on {api} and {ACKS}>, and publish and "
            f"subscribe on {READS}>: without them, messages are lost to it or repeated"
        )
        self._keeper.news.set()
