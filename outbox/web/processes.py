"""Processes: the connected relays and consumers, their lanes, and their backlogs."""

from dataclasses import dataclass
from typing import Any, Final

from starlette.datastructures import QueryParams

from outbox.administration.connection import AdministrationConnection
from outbox.lane import BUCKETS, PRIORITIES
from outbox.observability.overview import (
    BacklogGroup,
    Processes,
    Scope,
    read_overview,
)
from outbox.web.frame import Section
from outbox.web.overview import backlog_said

_SCOPE: Final = Scope(parts=("backlogs", "processes", "consumers", "pins"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityLanes:
    """The lanes of a priority.

    Attributes:
        holders: for each lane, the number of the relay that holds it, or None.
        waiting: the messages that wait; None if there are none.
    """

    name: str
    holders: tuple[int | None, ...]
    waiting: BacklogGroup | None


def read_page(
    connection: AdministrationConnection, query: QueryParams
) -> dict[str, Any]:
    """Read the connected processes, and the messages that wait for them."""
    del query
    overview = read_overview(connection, _SCOPE)
    processes = overview.processes
    backlog = overview.outbox
    holders = _holders(processes)
    waiting = {it.name: it for it in backlog.priorities} if backlog else {}
    return {
        "overview": overview,
        "processes": processes,
        "backlog_said": backlog_said,
        "buckets": BUCKETS,
        "priorities": [
            PriorityLanes(
                name=name,
                holders=tuple(
                    holders.get(number * BUCKETS + bucket) for bucket in range(BUCKETS)
                ),
                waiting=waiting.get(name.value),
            )
            for number, name in enumerate(PRIORITIES)
        ],
        "connected": {it.name: it for it in processes.consumers} if processes else {},
        "silent": [it.name for it in overview.consumers if it.replicas == 0],
    }


def _holders(processes: Processes | None) -> dict[int, int]:
    """Return, for each held lane, the number of its relay in the list."""
    if processes is None:
        return {}
    return {
        lane: number
        for number, relay in enumerate(processes.relays, 1)
        for lane in relay.lanes
    }


SECTION: Final = Section(
    path="processes", title="Processes", shortcut="r", read=read_page
)
