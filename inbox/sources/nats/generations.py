"""One replica at a time reads a durable, and the next one begins with what it held.

A replica reads only a durable that it has created itself, a *generation*: it begins
above the ack floor of the last one, which is then deleted. So a replica that was frozen
while it pulled gets nothing more, and whoever takes over gets everything unsettled
before anything newer. The order of a key needs nothing else: while two replicas read,
each of them gets all messages in order, and receipts absorb what comes twice.

When to take over, replicas learn by asking on a subject to which only the reader has
subscribed. If there is none, NATS itself says so at once.

Of several generations the last one survives. Only a replica that has seen a later one
deletes a generation; so one is always left, and with it a floor.
"""

import secrets
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError

from inbox.sources.nats.durable import FIRST, NOT_FOUND, ONLY_ONE, Durable, suffix
from outbox.brokers.nats.connection import ApiError, NatsConnection
from outbox.errors import ConfigError
from outbox.gather import cancellable

READS: Final = "pillarbox.reads."
_READING: Final = b"reading"
_LEFT: Final = b"left"
_STANDING_BY: Final = b"standing by"
_PAUSE: Final = 0.5
_RECENT: Final = 2.0
_ANSWER: Final = 5.0


class Generations:
    """Which durables this replica reads, over one connection.

    Args:
        durables: by their place; new generations are added.
        inbox: the prefix of the subjects of answers.
        wanted, default: the configuration of durables, as of `Durable.join`.
    """

    def __init__(
        self,
        connection: NatsConnection,
        durables: dict[str, Durable],
        inbox: str,
        wanted: Mapping[str, Any],
        default: Mapping[str, Any],
    ) -> None:
        self._connection = connection
        self._durables = durables
        self._all = [*durables.values()]
        self._inbox = inbox
        self._wanted, self._default = wanted, default

    @property
    def elsewhere(self) -> set[str]:
        """The topics that another replica reads."""
        return {durable.topic for durable in self._all if durable.is_elsewhere}

    async def begin(self, own: Collection[str]) -> int:
        """Take over new durables, and those that one of `own` is a generation of.

        Returns how many messages the new ones begin with.
        """
        old = 0
        for durable in self._all:
            # A replica without the right to delete must not create anything either.
            await durable.call(self._connection, "DELETE", (0, "none"))
            found = await durable.generations(self._connection)
            places = {f"{durable.line}{suffix(rank)}" for rank in found}
            if not found or not places.isdisjoint(own):
                old += await self._take_over(durable)
            elif info := await durable.call(self._connection, "INFO", found[-1]):
                durable.set_limits(info["config"])
                durable.is_old = found[-1] == FIRST
        await self.look()
        return old

    async def look(self) -> list[str]:
        """Take over durables that none reads; leave those that others should read.

        Returns the lines that were left.
        """
        left, now = [], time.monotonic()
        for durable in self._all:
            if durable.is_read:
                if now < min(durable.aside_until, durable.asked_at + _RECENT):
                    await self.leave(durable)
                    left.append(durable.line)
            elif now >= durable.aside_until and (
                durable.is_vacant or now >= durable.look_at
            ):
                await self._look_at(durable, now)
        return left

    async def leave(self, *durables: Durable) -> None:
        """Stop reading these durables, by default all, and tell who waits for that."""
        for durable in durables or self._all:
            if durable.is_read and durable.subscription is not None:
                await durable.subscription.unsubscribe()
                if time.monotonic() < durable.asked_at + _RECENT:
                    await self._connection.client.publish(durable.asked_by, _LEFT)
                durable.is_read, durable.generation = False, ""
                durable.is_elsewhere = True
        await self._connection.flush()

    def heard(self, durable: Durable, got: Msg) -> None:
        """Note an answer, or that there is none who could answer."""
        if got.headers or got.data == _LEFT:
            durable.is_vacant, durable.is_elsewhere = True, False
        elif got.data == _READING:
            durable.seen_at, durable.is_elsewhere = time.monotonic(), True

    async def _look_at(self, durable: Durable, now: float) -> None:
        if now - durable.look_at > durable.ack_wait / 2:
            durable.seen_at = now  # this replica was the frozen one
        durable.look_at = now + _PAUSE
        patience = durable.ack_wait
        if durable.is_old:
            info = await durable.call(self._connection, "INFO")
            durable.is_old = info is not None
            if info is not None and info["num_waiting"]:
                durable.seen_at = now
            elif info is not None and not info["num_ack_pending"]:
                patience = 2 * _PAUSE  # Between two pulls, none is waiting.
        silence = now - durable.seen_at
        durable.is_elsewhere |= durable.is_old or silence >= _PAUSE
        if durable.is_vacant or silence > patience:
            await self._take_over(durable)
        elif not durable.is_old:
            await self._connection.client.publish(
                f"{READS}{durable.line}", _STANDING_BY, f"{self._inbox}{durable.line}"
            )

    async def _answer(self, durable: Durable, got: Msg) -> None:
        if got.data == _STANDING_BY:
            durable.asked_at, durable.asked_by = time.monotonic(), got.reply
        with suppress(NatsError):
            await self._connection.client.publish(got.reply, _READING)

    async def _take_over(self, durable: Durable) -> int:
        client, subject = self._connection.client, f"{READS}{durable.line}"
        durable.is_vacant = False
        durable.subscription = await client.subscribe(
            subject, cb=partial(self._answer, durable)
        )
        try:
            # If others couldn't hear this one, they would take over again and again.
            with cancellable():
                await client.request(subject, timeout=_ANSWER)
            return await self._create(durable)
        except (NoRespondersError, NatsTimeoutError) as error:
            raise ConfigError(
                f"{self._connection.error or error}: replicas ask on {subject} who "
                f"reads, to keep the order; grant the user publish and subscribe on "
                f"{READS}>, and publish on {self._inbox.rsplit('.', 2)[0]}.>"
            ) from error
        finally:
            if not durable.is_read:
                durable.generation = ""
                with suppress(NatsError):
                    await durable.subscription.unsubscribe()

    async def _create(self, durable: Durable) -> int:
        connection = self._connection
        found = await durable.generations(connection)
        own = found[-1][0] + 1 if found else 1, secrets.token_hex(4)
        durable.generation = suffix(own)
        try:
            info, last = await durable.create_after(
                connection, found, self._wanted, self._default
            )
        except ApiError as error:
            if error.number not in {*ONLY_ONE, NOT_FOUND}:
                raise
            return 0  # another replica was faster
        others = await durable.generations(connection)
        if others[-1] > own:
            await durable.call(connection, "DELETE", own)
            return 0
        for rank in others:
            is_shared = rank == FIRST and (
                rank not in last or last[rank]["num_waiting"]
            )
            if rank < own and not is_shared:
                await durable.call(connection, "DELETE", rank)
        started = (each["delivered"]["stream_seq"] for each in last.values())
        durable.started = max(started, default=0)
        durable.number = durable.outstanding = 0
        durable.is_read, durable.is_old, durable.is_elsewhere = True, False, False
        self._durables[durable.place] = durable
        return 0 if found else int(info["num_pending"])
