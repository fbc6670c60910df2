"""The events of a process that reads the outbox, about its lanes and its database."""

import logging
from dataclasses import dataclass
from typing import ClassVar, Self

from pillarbox.outbox.errors import message_of
from pillarbox.outbox.events import Event
from pillarbox.outbox.postgres.remedy import remedy_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTaken(Event):
    """The relay leased lanes."""

    lanes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLost(Event):
    """The relay released lanes, or the server ended its lease."""

    lanes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LanesWithheld(Event):
    """Sessions that aren't relays hold lane locks, so messages of these lanes wait.

    Attributes:
        holders: these sessions, with process id, role and application.
        remedy: how to end them.
    """

    level = logging.WARNING
    waits_for = "lanes"
    holders: tuple[str, ...]
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LanesFree(Event):
    """No foreign session keeps this relay from leasing its lanes any longer."""

    ends = (LanesWithheld,)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerDiffers(Event):
    """Other relays of this database publish elsewhere, so this one holds no lanes.

    Attributes:
        broker: where this relay would publish.
        recorded: where relays of this database publish.
        remedy: how to switch.
    """

    level = logging.WARNING
    waits_for = "broker switch"
    broker: str
    recorded: str
    remedy: str

    @property
    def reason(self) -> str:
        """Why the relay is idle."""
        return (
            f"idle: this outbox is configured for {self.recorded}, but this relay"
            f" publishes to {self.broker}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderDropped(Event):
    """The reader of this relay was dropped, so it holds no lanes: stop it."""

    level = logging.WARNING
    waits_for = "reader"
    reason: ClassVar[str] = "idle: its reader was dropped"
    advice = "stop this relay; pillarbox readers list shows the existing readers"
    reader: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerMatches(Event):
    """The recorded broker was switched to this relay's, which now leases lanes."""

    ends = (BrokerDiffers, ReaderDropped)

    broker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseLost(Event):
    """A connection to PostgreSQL broke; it is reopened after the delay.

    Attributes:
        reason: the error.
        remedy: what to do, chosen by the error's SQLSTATE.
        seconds: the delay.
    """

    about = ()
    lasting_level = logging.WARNING
    waits_for = "database"
    reason: str
    remedy: str
    seconds: float

    @classmethod
    def of(cls, error: BaseException, seconds: float) -> Self:
        """Create the event for an error."""
        return cls(reason=message_of(error), remedy=remedy_of(error), seconds=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseRecovered(Event):
    """A broken connection was replaced."""

    ends = (DatabaseLost,)
