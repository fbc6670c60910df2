"""Blocked keys: the refused messages, and why."""

from typing import Any, Final

from starlette.datastructures import QueryParams

from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.observability.measures.reading import Scope
from pillarbox.outbox.observability.overview import read_overview
from pillarbox.outbox.web.frame import Section

_MOST_ROWS: Final = 100


def read_page(
    connection: AdministrationConnection, query: QueryParams
) -> dict[str, Any]:
    """Read the refused messages, oldest first."""
    del query
    scope = Scope(parts=["blocked"], blocked=_MOST_ROWS)
    return {"blocked": read_overview(connection, scope).blocked, "most": _MOST_ROWS}


SECTION: Final = Section(path="blocked", title="Blocked", read=read_page)
