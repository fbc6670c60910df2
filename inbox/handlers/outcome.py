"""How an attempt to handle a message ends, and the outcome for the message."""

from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

from typing_extensions import override

from pillarbox.outbox.logs.printable import count


@dataclass(frozen=True, slots=True)
class Handled:
    """The message was handled, now or before.

    Attributes:
        is_new: False for a duplicate.
        late_error: what a long handler raised after its job had finished.
    """

    is_new: bool
    late_error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Spent:
    """The handler wasn't called: the message used up its starts before.

    Attributes:
        starts: their number.
        reason: the last error; None if only their number is known.
    """

    starts: int
    reason: str | None = None

    @override
    def __str__(self) -> str:
        """Return the reason of the dead letter if no error is known."""
        return self.reason or f"started {count(self.starts, 'time')} and never finished"


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The job was cancelled and has ended."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The consumer is stopping; another process will handle the message."""


@dataclass(frozen=True, slots=True)
class Dead:
    """No attempt is left, or none would help."""

    failure: str | BaseException
    attempts: int


@dataclass(frozen=True, slots=True)
class Returned:
    """The broker has the message again, and will deliver it."""


@dataclass(frozen=True, slots=True)
class Paused:
    """The handler was not called, because its topic is paused."""


@dataclass(frozen=True, slots=True)
class Later:
    """The attempt doesn't count, and the next one begins after a delay."""

    delay: timedelta
    reason: str


@dataclass(frozen=True, slots=True)
class Outage:
    """The database was lost, so the attempt doesn't count."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Failed:
    """The handler raised."""

    error: Exception


Outcome: TypeAlias = Handled | Dead | Spent | Cancelled | Returned | Stopped
"""The outcome for a message."""
JobOutcome: TypeAlias = Handled | Later | Spent | Cancelled | Stopped
"""How the attempt of a long handler ends, if it doesn't raise."""
Again: TypeAlias = Later | Outage | Failed | Paused
"""How an attempt ends that may be followed by another one."""
