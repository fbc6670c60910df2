"""Whatever keeps old snapshots or transactions in use."""

from dataclasses import dataclass
from datetime import timedelta

from pillarbox.outbox.observability.measures.reading import Reading
from pillarbox.outbox.postgres.sql_files import load


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Something that keeps an old snapshot or transaction in use.

    Until it ends, partitions can't be detached, and dead rows can't be removed. A
    transaction that writes also slows down the claims of consumers of the postgres
    broker.

    Attributes:
        kind: session, prepared transaction, replication slot or standby.
        name: the name of the application, the transaction or the slot.
        open_for: how long it has been open; None if this role can't see that, or it
            isn't a transaction.
        xid: the oldest transaction that it needs; None if it needs none.
        xids: how many transactions it lies behind; None if it needs none.
        slot: for a replication slot, its plugin, its database, and how much WAL it
            keeps.
    """

    kind: str
    name: str | None
    pid: int | None
    role: str | None
    state: str | None
    open_for: timedelta | None
    is_writing: bool
    xid: str | None
    xids: int | None
    slot: str | None


def read_pins(reading: Reading) -> tuple[Pin, ...]:
    """Read what has been in use for long, longest first."""
    return reading.rows_of(
        Pin,
        load("outbox", "list_pins"),
        at_least=reading.scope.pins_from,
        xids=reading.scope.pins_behind,
    )
