"""An observer for tests that wait for events instead of sleeping."""

import asyncio
from collections import Counter
from typing import TypeVar

from pillarbox.outbox.events import Event

__all__ = ["RecordedEvents"]

E = TypeVar("E", bound=Event)


class RecordedEvents:
    """An observer that records every event, and lets a test wait for some of them.

    For one event loop, from which all events must come.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = asyncio.Event()

    def __call__(self, event: Event) -> None:
        """Record an event."""
        self.events.append(event)
        self._changed.set()

    def of(self, kind: type[E]) -> list[E]:
        """Return the events of a kind so far, in order."""
        return [event for event in self.events if isinstance(event, kind)]

    async def wait_for(
        self,
        kind: type[E],
        count: int = 1,
        *,
        timeout: float = 60,  # noqa: ASYNC109
    ) -> list[E]:
        """Wait until `count` events of a kind have happened since the start.

        Raises:
            TimeoutError: they didn't happen in time; the message lists those that did.
        """
        found: list[E] = []
        seen = 0
        try:
            async with asyncio.timeout(timeout):
                while len(found) < count:
                    if seen == len(self.events):
                        self._changed.clear()
                        await self._changed.wait()
                    new, seen = self.events[seen:], len(self.events)
                    found += [event for event in new if isinstance(event, kind)]
        except TimeoutError:
            tally = dict(Counter(type(event).__name__ for event in self.events))
            raise TimeoutError(
                f"{len(found)} of {count} {kind.__name__} happened within "
                f"{timeout} s; all events: {tally}; the last: {self.events[-3:]}"
            ) from None
        return found
