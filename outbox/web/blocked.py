"""Blocked keys: the refused messages, why, and the messages that wait behind them."""

from dataclasses import dataclass
from typing import Any, Final

from starlette.datastructures import QueryParams

from outbox.administration.connection import AdministrationConnection
from outbox.administration.sides import Blocked, load_sides
from outbox.dead_letters.statement import Schema
from outbox.web.frame import Section

_MOST_ROWS: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfSide:
    side: Schema
    keys: int
    without_key: int
    messages: tuple[Blocked, ...]


def read_page(
    connection: AdministrationConnection, query: QueryParams
) -> dict[str, Any]:
    """Read the refused messages of both sides, oldest first."""
    del query
    sides = []
    for side in load_sides(None):
        count = side.read_blocked_count(connection)
        refused = count.keys or count.without_key
        sides.append(
            _OfSide(
                side=side.schema,
                keys=count.keys,
                without_key=count.without_key,
                messages=tuple(side.read_blocked(connection, _MOST_ROWS))
                if refused
                else (),
            )
        )
    return {"sides": sides, "most": _MOST_ROWS}


SECTION: Final = Section(
    path="blocked", title="Blocked keys", shortcut="b", read=read_page
)
