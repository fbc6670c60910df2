"""What a consumer may hold at once, and for how long."""

from dataclasses import dataclass
from datetime import timedelta

from inbox.idle import check_max_idle
from outbox.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The limits of one consumer; `Consumer` says what each of them is.

    Raises:
        ConfigError: one of them is below what it is at least.
    """

    max_in_flight: int
    max_in_flight_per_tenant: int | None
    max_prefetched: int | None
    max_waiting: int
    max_idle: timedelta | None
    drain: timedelta

    def __post_init__(self) -> None:
        """Refuse what can't be kept to."""
        for field, value, least in (
            ("max_in_flight", self.max_in_flight, 1),
            ("max_in_flight_per_tenant", self.max_in_flight_per_tenant, 1),
            ("max_prefetched", self.max_prefetched, 0),
            ("max_waiting", self.max_waiting, 0),
        ):
            if value is not None and value < least:
                raise ConfigError(f"{field}={value}: must be at least {least}")
        check_max_idle(self.max_idle)
        if self.drain < timedelta(0):
            raise ConfigError(f"drain={self.drain}: must not be negative")

    @property
    def max_lines(self) -> int:
        """Messages that each queue holds at work or ready."""
        if self.max_prefetched is None:
            return 2 * self.max_in_flight
        return self.max_in_flight + self.max_prefetched
