"""The limits of a consumer: how much it can hold at once, and for how long."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from pillarbox.inbox.idle import check_max_idle
from pillarbox.outbox.duration import check_duration, exact_duration
from pillarbox.outbox.errors import ConfigError, check_type

HELD_BYTES: Final = 64 * 1024 * 1024
"""The payloads that a queue holds before it stops fetching: as much as thousands of
ordinary messages have, and a few dozen of the largest. See docs/containers.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerLimits:
    """The limits of one consumer, documented in `Consumer`.

    Raises:
        ConfigError: one of them is below its minimum.
    """

    max_in_flight: int
    max_in_flight_per_tenant: int | None
    max_waiting: int
    max_idle: timedelta | None
    drain: timedelta
    rollout: timedelta

    def __post_init__(self) -> None:
        """Refuse invalid limits."""
        for field, value, least in (
            ("max_in_flight", self.max_in_flight, 1),
            ("max_in_flight_per_tenant", self.max_in_flight_per_tenant, 1),
            ("max_waiting", self.max_waiting, 0),
        ):
            if value is None:
                continue
            check_type(field, value, int, "pass a whole number")
            if value < least:
                raise ConfigError(f"{field}={value}: must be at least {least}")
        check_max_idle(self.max_idle)
        for field, duration in (("drain", self.drain), ("rollout", self.rollout)):
            check_duration(field, duration)
            if duration < timedelta(0):
                raise ConfigError(
                    f"{field}={exact_duration(duration)}: must not be negative"
                )

    @property
    def max_lines(self) -> int:
        """The number of messages that each queue can hold, running or ready."""
        return self.max_in_flight + min(self.max_in_flight, self.max_waiting)
