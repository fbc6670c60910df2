"""The entries that a source holds, from their arrival until their outcome is written.

A source has a `Keeper` and tells it what is special about its broker: how outcomes are
written, how a heartbeat keeps entries from other replicas, and how entries are returned
when the source is left. Heartbeats and outcomes never cross: otherwise a heartbeat
could take back an entry that was just handed back.
"""

import asyncio
import math
import time
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Hashable,
    Iterable,
    Sequence,
)
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, NamedTuple, TypeVar

from pillarbox.inbox.consuming.backlog import Backlog
from pillarbox.inbox.consuming.outcomes import Outcomes
from pillarbox.inbox.source import Arrived
from pillarbox.outbox.errors import BrokerUnavailableError


@dataclass(slots=True, eq=False, kw_only=True)
class Held(Arrived):
    """An entry that a source holds.

    Attributes:
        at: its name at the broker.
        until: when other replicas can get it unless a heartbeat extends that, by the
            monotonic clock.
        settled: whether it has an outcome, which only has to be written.
    """

    at: Hashable
    until: float = math.inf
    settled: bool = False


E = TypeVar("E", bound=Held)


class Outcome(NamedTuple, Generic[E]):
    """The ack or nack to send for an entry."""

    entry: E
    delay: float | None
    """How long the broker keeps it back, in seconds; None: it was acked."""


class Keeper(Generic[E]):
    """Keeps entries, and settles their deliveries. For one event loop.

    Args:
        write: writes outcomes; called again if it raises `BrokerUnavailableError`.
        extend: keeps entries from other replicas, and returns those that they have got
            already; can raise `BrokerUnavailableError`.
        pause: returns the seconds until the next heartbeat.

    Attributes:
        held: the entries without a written outcome, by their names at the broker.
        backlog: those to be delivered, now or after a delay.
        news: set when there may be more to deliver.
    """

    def __init__(
        self,
        write: Callable[[Sequence[Outcome[E]]], Awaitable[None]],
        extend: Callable[[Sequence[E]], Awaitable[Iterable[E]]],
        *,
        pause: Callable[[], float],
    ) -> None:
        self.held: dict[Hashable, E] = {}
        self.backlog: Backlog[E] = Backlog()
        self.news = asyncio.Event()
        self._write_outcomes = write
        self._extend = extend
        self._pause = pause
        self._outcomes: Outcomes[Outcome[E]] = Outcomes(self._write)
        self._turn = asyncio.Lock()

    def start(self, *others: Coroutine[Any, Any, None]) -> None:
        """Write outcomes and send heartbeats in tasks, next to the source's own.

        Nothing is left from the last time that the source was entered.
        """
        self.forget(lambda _: True)
        self._outcomes = Outcomes(self._write)
        self._outcomes.start(self._beat(), *others)

    async def check(self) -> None:
        """Check that outcomes can be written; see `Outcomes.check`."""
        await self._outcomes.check()

    def hold(self, entries: Iterable[E]) -> None:
        """Take entries that have arrived, except those that are held already."""
        for entry in entries:
            if self.held.setdefault(entry.at, entry) is entry:
                self.backlog.add(entry)
        self.news.set()

    def take(self, limit: int) -> list[E]:
        """Return up to `limit` entries to deliver, in order."""
        taken: list[E] = []
        now = time.monotonic()
        while entries := self.backlog.take(limit - len(taken)):
            self._lose(entry for entry in entries if entry.until <= now)
            taken += filter(self._holds, entries)
        return taken

    def acked(self, entry: E) -> None:
        """Schedule the ack of an entry."""
        self._settle(entry, None)

    def nacked(self, entry: E, delay: timedelta | None) -> None:
        """Return an entry to its place in the order, or delay it."""
        if not self._holds(entry):
            return  # the broker redelivers it
        if delay is None:
            self.backlog.add(entry)
        else:
            entry.attempts += 1
            self.backlog.defer(entry, delay.total_seconds())
        self.news.set()

    def handed_back(self, entry: E, delay: timedelta) -> bool:
        """Schedule the return of an entry to the broker."""
        if self._holds(entry):
            self._settle(entry, max(0.0, delay.total_seconds()))
        return True

    def kept_back(self, entry: E, delay: timedelta) -> bool:
        """Keep an entry and its key here for a time; no attempt is counted."""
        if self._holds(entry):
            self.backlog.defer(entry, delay.total_seconds())
            self.news.set()
        return True

    def forget(self, is_one: Callable[[E], bool]) -> None:
        """Forget entries that another replica gets now; running handlers continue."""
        for entry in list(self.held.values()):
            if is_one(entry):
                self._forget(entry)
        self.backlog.remove(lambda entry: self.held.get(entry.at) is not entry)

    async def release(self, is_one: Callable[[E], bool]) -> None:
        """Return entries to the broker that are not delivered yet."""
        async with self._turn:
            held = filter(self._holds, self.backlog)
            if entries := [entry for entry in held if is_one(entry)]:
                await self._write_outcomes([Outcome(entry, 0.0) for entry in entries])
                returned = set(entries)
                self.forget(returned.__contains__)

    async def leave(
        self, seconds: float, give_back: Callable[[dict[E, float]], Awaitable[None]]
    ) -> None:
        """Write the outcomes, then return all other entries, each within a time.

        If the broker is unavailable, other replicas get the entries later.

        Args:
            give_back: returns entries in order, each after the given seconds.
        """
        await self._outcomes.finish(seconds)
        left = dict(self.backlog.waiting())
        entries = [entry for entry in self.held.values() if not entry.settled]
        entries.sort(key=lambda entry: entry.place)
        with suppress(BrokerUnavailableError, TimeoutError):
            async with asyncio.timeout(seconds):
                await give_back({entry: left.get(entry, 0.0) for entry in entries})

    async def beat(self) -> None:
        """Send a heartbeat."""
        async with self._turn:
            if entries := list(self.held.values()):
                self._lose(await self._extend(entries))

    async def end(self) -> None:
        """End all tasks."""
        await self._outcomes.finish(0)

    def _holds(self, entry: E) -> bool:
        return self.held.get(entry.at) is entry and not entry.settled

    def _settle(self, entry: E, delay: float | None) -> None:
        entry.settled = True
        self._outcomes.add(Outcome(entry, delay))

    def _lose(self, lost: Iterable[E]) -> None:
        """Forget lost entries, and later ones that would overtake their redelivery."""
        first: dict[str | None, int] = {}
        for entry in lost:
            self._forget(entry)
            first[entry.key] = min(entry.place, first.get(entry.key, entry.place))
        if first:
            self.forget(
                lambda it: it.key is not None and it.place > first.get(it.key, it.place)
            )

    def _forget(self, entry: E) -> None:
        if self.held.get(entry.at) is entry:
            del self.held[entry.at]

    async def _write(self, outcomes: Sequence[Outcome[E]]) -> None:
        async with self._turn:
            await self._write_outcomes(outcomes)
            for entry, _ in outcomes:
                self._forget(entry)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._pause())
            with suppress(BrokerUnavailableError):
                await self.beat()
