"""A consumer's own page: its replicas, what they do, and what fails."""

from typing import Any, Final

from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException

from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.administration.readers import consumer_of
from pillarbox.outbox.observability.measures.failures import read_blocked
from pillarbox.outbox.observability.measures.reading import Scope
from pillarbox.outbox.observability.overview import read_overview
from pillarbox.outbox.web.dead_letters import read_groups
from pillarbox.outbox.web.frame import Section
from pillarbox.outbox.web.overview import backlog_text
from pillarbox.outbox.web.selection import Selection

_SCOPE: Final = Scope(parts=["processes", "consumers", "jobs"])
_MOST_ROWS: Final = 20
_MOST_BLOCKED: Final = 1000


def read_page(
    connection: AdministrationConnection, query: QueryParams
) -> dict[str, Any]:
    """Read what the database knows of one consumer."""
    name = query.get("name", "")
    overview = read_overview(connection, _SCOPE)
    found = [it for it in overview.consumers if it.name == name]
    running = overview.processes.consumers if overview.processes else ()
    if not found:
        raise HTTPException(
            404,
            f"No consumer {name} runs, reads this outbox or has handled messages in "
            "the last 5 minutes. The overview lists those that do.",
        )
    consumer = consumer_of(name)
    replicas = [it for it in running if it.name == consumer]
    of_consumer = Selection(side="inbox", origin=f"consumer:{consumer}")
    refused = (
        read_blocked(connection, _MOST_BLOCKED).oldest if found[0].is_reader else ()
    )
    return {
        "title": f"Consumer {name}",
        "overview": overview,
        "consumer": found[0],
        "pausable": consumer,
        "replicas": replicas,
        "pauses": overview.pauses_of(name),
        "jobs": next((it for it in overview.jobs if it.consumer == consumer), None),
        "groups": read_groups(connection, of_consumer, _MOST_ROWS),
        "blocked": [
            it for it in refused if name in (it.reader, consumer_of(it.reader))
        ],
        "backlog_text": backlog_text,
    }


SECTION: Final = Section(path="consumer", title="Consumer", read=read_page)
