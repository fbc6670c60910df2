"""Register handlers: of single messages, of batches, and long ones."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from pillarbox.inbox.handlers.routes import Routes, name_of
from pillarbox.inbox.handlers.signature import Takes
from pillarbox.inbox.handlers.terms import Terms
from pillarbox.outbox.duration import check_duration, exact_duration
from pillarbox.outbox.errors import ConfigError, check_type


@dataclass(eq=False)
class Registered:
    """A handler and its terms.

    Attributes:
        call: what is called with a session or job, and a message or messages.
        size: the maximum number of messages in one call of a batch handler. They have
            different keys, unless the queue doesn't keep order.
        lease: how long a process that hangs keeps the job of a long handler.
    """

    call: Callable[..., Any]
    takes: Takes
    terms: Terms
    size: int = 1
    lease: timedelta = timedelta(0)

    def __post_init__(self) -> None:
        """Refuse invalid terms of its kind.

        Raises:
            ConfigError: the size or the lease is of another type, or below its minimum.
        """
        self.__qualname__ = name_of(self.call)
        check_type("max_size", self.size, int, "pass a whole number")
        check_duration("lease", self.lease)
        if self.takes is Takes.MANY and self.size < 2:
            raise ConfigError(f"max_size={self.size}: must be at least 2")
        if self.takes is Takes.JOB and self.lease < timedelta(seconds=1):
            raise ConfigError(
                f"lease={exact_duration(self.lease)}: must be at least 1s"
            )


def most_connections(max_in_flight: int, routes: Routes[Registered]) -> int:
    """Return how many connections `max_in_flight` handlers use at most.

    A batch handler handles one batch at a time. Long handlers need one more connection,
    for their heartbeats.
    """
    kinds = [handler.takes for handler in routes.handlers]
    if set(kinds) == {Takes.MANY}:
        return min(max_in_flight, len(kinds))
    return max_in_flight + (Takes.JOB in kinds)
