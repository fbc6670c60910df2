"""Give one delivery up: its dead letter is written before the ack, whatever it holds.

written, or PENDING already ──▶ ack
database away   ──▶ again when it is back
the row refused ──▶ at once a spare one, which fits whatever was in the message
"""

from typing import Any, Final

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from inbox.consuming.dispatch import Flight
from inbox.consuming.outage import Outage
from inbox.dead_letters.write import DeadLetterWriter, Failure, Stacktraces
from inbox.events import DeadLetterRepeated, MessageDeadLettered
from inbox.handlers.executor import connection_broke
from inbox.source import Delivery
from outbox.errors import BrokerUnavailableError, InvalidMessageError, OutboxError
from outbox.events import Observers
from outbox.limits import check_received
from outbox.message import Message

_AWAY: Final = (
    OperationalError,
    InterfaceError,
    PoolTimeoutError,
    OSError,
    OutboxError,
)
# By class: data, constraint and program limit; internal: too large to be put together.
_OF_THE_ROW: Final = ("22", "23", "54", "XX000")


class GivingUp:
    """Writes the dead letters of one run of a consumer, and acks what they are of.

    Attributes:
        stacktraces: those that the run has told.
    """

    def __init__(
        self, dead_letters: DeadLetterWriter, outage: Outage, observers: Observers
    ) -> None:
        self._dead_letters = dead_letters
        self.stacktraces = Stacktraces()
        self._outage = outage
        self._notify = observers.notify

    async def give_up(
        self,
        delivery: Delivery,
        flight: Flight,
        failure: str | BaseException,
        attempts: int,
    ) -> bool:
        """Write a dead letter and ack; give False if the flight stops first."""
        written: Failure | None = None
        refusal: str | None = None
        lost = 0
        while written is None:
            try:
                async with flight.turn(delivery.message):
                    written = await self._dead_letters.write(
                        delivery.message,
                        attempts=attempts,
                        failure=failure,
                        readable=problem_of(delivery) is None,
                        refusal=refusal,
                    )
            except Exception as error:  # noqa: BLE001 (nothing else can be done with it)
                if refusal is None:
                    refusal = refusal_of(error)
                    if refusal is not None:
                        continue
                # What refuses the spare row as well is no matter of this message.
                refusal = None
                lost += 1
                if not await self._outage.wait(error, lost, flight):
                    return False
        self._outage.end()
        about = about_message(self._dead_letters.consumer, delivery.message)
        if written.is_new:
            trace = self.stacktraces.first(delivery.message, failure, written)
            self._notify(
                MessageDeadLettered(
                    **about,
                    attempts=attempts,
                    reason=written.reason,
                    stacktrace=trace,
                )
            )
        else:
            self._notify(DeadLetterRepeated(**about))
        await ack(delivery)
        return True


def problem_of(delivery: Delivery) -> str | None:
    """Say why a delivery can't be handled, and not be kept as a message that can."""
    if delivery.problem is not None:
        return delivery.problem
    try:
        check_received(delivery.message)
    except InvalidMessageError as error:
        return str(error)
    return None


def refusal_of(error: Exception) -> str | None:
    """Say how a row was refused for what is in it; None if that is an outage.

    The server's own words are left out: they may quote the row.
    """
    refused_by = error.orig if isinstance(error, DBAPIError) else error
    state = getattr(refused_by, "sqlstate", None) or getattr(refused_by, "pgcode", None)
    if state is None:
        # It was the driver, or we, who could not even write it.
        is_away = isinstance(error, _AWAY) or connection_broke(error)
        return None if is_away else type(refused_by).__name__
    if not str(state).startswith(_OF_THE_ROW):
        return None
    return f"{type(refused_by).__name__}, SQLSTATE {state}"


def about_message(consumer: str, message: Message) -> dict[str, Any]:
    """Give what every event about a message says."""
    return {
        "consumer": consumer,
        "id": message.id,
        "topic": message.topic,
        "key": message.key,
    }


async def ack(delivery: Delivery) -> None:
    """Ack, if the broker is there: else it comes again, and is known."""
    try:
        await delivery.ack()
    except BrokerUnavailableError:
        return
