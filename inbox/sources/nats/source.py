"""A source that reads NATS JetStream through durable pull consumers.

JetStream delivers messages to any replica that asks. So a key is in order with one
replica, but may not be with several, or after a crash, since messages that were held
are redelivered only when `ack_wait` ends. Receipts still prevent effects from happening
twice. Heartbeats keep messages with the replica that holds them, and a message that
waits for its retry holds back its key here.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, Self

from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from inbox.consuming.backlog import Backlog
from inbox.consuming.outcomes import Outcomes
from inbox.consuming.rollout import begins_at_oldest
from inbox.source import Abilities, Delivery, EntryDelivery
from inbox.sources.nats.durable import NANOSECONDS, Entry, find_durables
from inbox.sources.nats.pull import ACKS, Pulls, give_back, nak
from outbox.brokers.nats.connection import ApiError, NatsConnection
from outbox.brokers.nats.options import NAME_FORM, is_name
from outbox.brokers.nats.settings import NatsSettings
from outbox.errors import BrokerUnavailableError, ConfigError, shorten
from outbox.retry import jittered

_DEFAULT: Final = {
    "ack_wait": 30 * NANOSECONDS,
    "max_deliver": -1,
    "max_ack_pending": 10_000,
}
_LAST_WRITE: Final = 5.0
_BEATS: Final = 3
_BROKEN: Final = (NatsError, OSError, TimeoutError, BrokerUnavailableError)


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
        self.abilities = Abilities(warnings=lambda: self._warnings)
        self._connecting = asyncio.Lock()
        self._entered = False
        self._pulls: Pulls | None = None
        self._refusal: str | None = None
        self._came = asyncio.Event()
        self._held: dict[tuple[str, int], Entry] = {}
        self._backlog: Backlog[Entry] = Backlog()
        self._outcomes: Outcomes[tuple[Entry, bytes]] = Outcomes(self._settle)

    async def __aenter__(self) -> Self:
        """Connect; create or update the durables.

        Raises:
            BrokerUnavailableError: NATS is unreachable, or rejects the connection.
            ConfigError: no stream captures a topic, or a durable isn't a pull consumer
                with explicit acks.
        """
        self._entered = True
        await self._connected()
        self._outcomes.start(self._beat())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Write the acks, and return all other messages to the stream."""
        try:
            with suppress(*_BROKEN):
                async with asyncio.timeout(_LAST_WRITE):
                    await self._leave()
        finally:
            self._entered = False
            try:
                await self._outcomes.finish(0)
            finally:
                if self._pulls is not None:
                    await self._pulls.connection.drop("the source is closed")

    async def receive(self, *, limit: int) -> Sequence[Delivery]:
        """Return new deliveries, and delayed ones that are due."""
        await self._outcomes.check()
        try:
            pulls = await self._connected()
            entries = self._backlog.take(limit)
            if not entries:
                await self._fetch(pulls, limit)
                entries = self._backlog.take(limit)
        except ConfigError as error:
            # The configuration was valid at the start.
            raise BrokerUnavailableError(str(error)) from error
        except (NatsError, OSError) as error:
            raise self._settings.unavailable(error) from error
        return [EntryDelivery(self, entry, entry) for entry in entries]

    def acked(self, entry: Entry) -> None:
        """Schedule the ack of an entry."""
        self._outcomes.add((entry, b"+ACK"))

    def nacked(self, entry: Entry, delay: timedelta | None) -> None:
        """Return an entry to its place in the order, or delay it."""
        if delay is None:
            self._backlog.add(entry)
        else:
            entry.attempts += 1
            self._backlog.defer(entry, delay.total_seconds())
        self._came.set()

    def handed_back(self, entry: Entry, delay: timedelta) -> bool:
        """Return an entry to the stream, which keeps it back for the delay."""
        self._outcomes.add((entry, nak(delay.total_seconds())))
        return True

    async def _fetch(self, pulls: Pulls, limit: int) -> None:
        self._came.clear()
        poll = jittered(self._poll)
        await pulls.ask(limit, poll)
        await self._backlog.wait_for(self._came, poll)
        if pulls.is_overdue:
            await pulls.connection.drop("it doesn't answer")
        await self._drop_if_refused(pulls.connection)
        if pulls.connection.lost is not None:
            raise pulls.connection.lost

    async def _on_message(self, got: Msg) -> None:
        if self._pulls is not None and (entry := await self._pulls.read(got)):
            at = entry.durable, entry.place
            if at in self._held:
                # The message or a heartbeat was late; this replica still holds it.
                self._held[at].reply = entry.reply
            else:
                self._held[at] = entry
                self._backlog.add(entry)
        self._came.set()

    async def _leave(self) -> None:
        # A pull can't be cancelled, so wait for its messages.
        while self._pulls is not None and self._pulls.is_open:
            self._came.clear()
            await self._came.wait()
        await self._outcomes.finish(_LAST_WRITE)
        if self._pulls is None or self._pulls.connection.lost is not None:
            return
        delays = {id(entry): left for entry, left in self._backlog.waiting()}
        await give_back(
            self._pulls.connection,
            [
                (entry, delays.get(id(entry), 0.0))
                for _, entry in sorted(self._held.items())
            ],
        )

    async def _settle(self, outcomes: Sequence[tuple[Entry, bytes]]) -> None:
        try:
            connection = (await self._connected()).connection
            for entry, word in outcomes:
                await connection.client.publish(entry.reply, word)
        except ConfigError as error:
            raise BrokerUnavailableError(str(error)) from error
        except (NatsError, OSError) as error:
            raise self._settings.unavailable(error) from error
        await connection.flush()
        # NATS reports refused acks before it answers the flush.
        await self._drop_if_refused(connection)
        if connection.lost is not None:
            raise connection.lost
        for entry, _ in outcomes:
            self._held.pop((entry.durable, entry.place), None)

    async def _beat(self) -> None:
        while True:
            if self._pulls is None:
                return
            await asyncio.sleep(self._pulls.ack_wait / _BEATS)
            with suppress(NatsError, OSError):
                for entry in list(self._held.values()):
                    client = self._pulls.connection.client
                    await client.publish(entry.reply, b"+WPI")

    async def _connected(self) -> Pulls:
        async with self._connecting:
            if not self._entered:
                raise self._settings.unavailable("the source is closed")
            if self._pulls is not None and self._pulls.connection.lost is None:
                return self._pulls
            self._refusal = None
            connection = NatsConnection(
                self._settings, on_lost=self._lost, on_refusal=self._refused
            )
            await connection.open()
            try:
                durables = await find_durables(
                    connection,
                    self._consumer,
                    self._topics,
                    self._settings.options.stream,
                )
                old = 0
                for durable in durables:
                    old += await durable.join(connection, self._wanted, _DEFAULT)
                if old:
                    self._warnings = [begins_at_oldest(self._consumer, old)]
                pulls = Pulls(connection, self._settings.api, durables)
                await pulls.listen(self._on_message)
            except BaseException as error:
                await connection.drop()
                if isinstance(error, NatsError | ApiError):
                    raise self._settings.unavailable(error) from error
                raise
            self._pulls = pulls
            return pulls

    async def _drop_if_refused(self, connection: NatsConnection) -> None:
        if self._refusal is not None:
            await connection.drop(
                f"{self._refusal}; grant the user publish on {ACKS}>, or every message "
                "is redelivered"
            )

    def _refused(self, text: str) -> None:
        # The text is in lower case and names the subject of one ack.
        if f'"{ACKS.lower()}' in text:
            self._refusal = text
            self._came.set()

    def _lost(self, reason: BrokerUnavailableError) -> None:
        self._came.set()
