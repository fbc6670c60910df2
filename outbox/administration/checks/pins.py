"""Transactions, slots and standbys that hold back vacuum or a detach."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Final

from pillarbox.outbox.administration.check import Finding, warning
from pillarbox.outbox.duration import write_duration
from pillarbox.outbox.logs.printable import STRING, for_sql
from pillarbox.outbox.observability.measures.pins import Pin
from pillarbox.outbox.observability.overview import Overview

_LONG: Final = timedelta(hours=1)


def check_pins(overview: Overview) -> Iterator[Finding]:
    """Find transactions, slots and standbys that have needed old rows for long."""
    for pin in overview.pins:
        if pin.open_for is not None and pin.open_for < _LONG:
            continue
        if pin.kind == "replication slot" and pin.state == "inactive":
            # Its reader may be down, and need what is kept.
            yield warning(
                f"the replication slot {pin.name} ({pin.slot}) is inactive, so its"
                " WAL keeps growing",
                "find its owner, which may be down: Debezium, a subscription, a"
                " standby, a backup; all unread changes are lost with the slot",
            )
            continue
        who = f"{pin.kind} {pin.name}" if pin.name else pin.kind
        role = f" of {pin.role}" if pin.role else ""
        since = (
            f"has been open for {write_duration(pin.open_for)}"
            if pin.open_for is not None
            else f"is {pin.xids} transactions behind"
        )
        writes = ", and has written" if pin.is_writing else ""
        yield warning(
            f"{who}{role} (pid {pin.pid or '-'}) {since}{writes}, so partitions can't"
            " be detached",
            _end(pin),
        )


def _end(pin: Pin) -> str:
    match pin.kind:
        case "session":
            return f"SELECT pg_terminate_backend({pin.pid});"
        case "prepared transaction":
            return (
                f"COMMIT PREPARED {for_sql(pin.name, STRING)};  -- or ROLLBACK PREPARED"
            )
        case _:
            return (
                "SELECT * FROM pg_stat_replication;  -- shows how far each standby is"
            )
