"""Relays and consumers create missing partitions, whether or not an upkeep runs."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final

from pillarbox.outbox.errors import one_line
from pillarbox.outbox.events import Event, Observer
from pillarbox.outbox.postgres.sql_files import load

MAKE_DAYS: Final = load("outbox", "make_days")
_INTERVAL: Final = 3600.0
_RETRY: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionsNotMade(Event):
    """A process could not create missing partitions; it tries again in a minute.

    Rows of days without a partition are refused.

    Attributes:
        reason: what could not be created, and why.
    """

    level = logging.WARNING
    about = ("reason",)

    reason: str
    remedy: str


class Days:
    """Creates missing partitions at the start of a process and once an hour.

    Args:
        make: runs `MAKE_DAYS` and returns its rows.
        notify: called with what could not be created, which never stops the process.
    """

    def __init__(
        self,
        make: Callable[[], Awaitable[Iterable[tuple[str, str]]]],
        notify: Observer,
    ) -> None:
        self._make = make
        self._notify = notify
        self._pause = _INTERVAL

    async def make(self) -> None:
        """Create what is missing now."""
        try:
            problems = list(await self._make())
        except Exception as error:  # noqa: BLE001 - of any driver
            problems = [(one_line(error), "pillarbox doctor finds the cause")]
        for reason, remedy in problems:
            self._notify(PartitionsNotMade(reason=reason, remedy=remedy))
        self._pause = _RETRY if problems else _INTERVAL

    async def keep(self) -> None:
        """Create what becomes missing, until cancelled."""
        while True:
            # Not all replicas at the same time.
            await asyncio.sleep(self._pause * random.uniform(0.9, 1))  # noqa: S311
            await self.make()
