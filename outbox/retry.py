"""When to try again: exponential backoff with jitter.

As in decorrelated jitter, a delay is drawn between the first delay and three times the
previous maximum. But the maximum depends only on the number of attempts, so no previous
delay has to be stored.
"""

import random
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from pillarbox.outbox.duration import check_duration, exact_duration
from pillarbox.outbox.errors import ConfigError, check_type


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long to wait after a failure, and how often to try.

    Attributes:
        max_attempts: the number of attempts after which a message is a dead letter.
        first_delay: the shortest wait.
        max_delay: the longest wait.
    """

    max_attempts: int = 8
    first_delay: timedelta = timedelta(seconds=1)
    max_delay: timedelta = timedelta(minutes=5)

    def __post_init__(self) -> None:
        """Check the values."""
        check_type("max_attempts", self.max_attempts, int, "pass a whole number")
        check_duration("first_delay", self.first_delay)
        check_duration("max_delay", self.max_delay)
        if self.max_attempts < 1:
            raise ConfigError(f"max_attempts={self.max_attempts}: must be at least 1")
        if not timedelta(0) < self.first_delay <= self.max_delay:
            raise ConfigError(
                f"first_delay={exact_duration(self.first_delay)}, "
                f"max_delay={exact_duration(self.max_delay)}: "
                "the first must be above 0 and not above the second"
            )

    @property
    def longest(self) -> timedelta:
        """The longest time that all delays together can take."""
        return self.max_attempts * self.max_delay

    def delay(self, attempts: int) -> timedelta:
        """Return a random delay after `attempts` failed attempts, counted from 1.

        It is drawn between `first_delay` and `first_delay * 3 ** attempts`, capped: the
        spread keeps messages that failed together from returning together.
        """
        first = self.first_delay.total_seconds()
        cap = self.max_delay.total_seconds()
        ceiling = min(cap, first * 3.0 ** min(attempts, 64))
        return timedelta(seconds=random.uniform(first, ceiling))  # noqa: S311

    def spent(self, attempts: int) -> bool:
        """Return whether no attempt is left after `attempts`."""
        return attempts >= self.max_attempts


RECONNECT: Final = RetryPolicy(
    first_delay=timedelta(milliseconds=100), max_delay=timedelta(seconds=1)
)
"""The waits for an unavailable server. At most a second, so that work continues soon
after the server is back, however long it was away."""


def jittered(seconds: float) -> float:
    """Return a random time from half to all of `seconds`, to spread idle processes."""
    return random.uniform(seconds / 2, seconds)  # noqa: S311
