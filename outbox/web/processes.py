"""Processes: which relays and consumers are connected, and the lanes that they hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from psycopg.rows import class_row
from starlette.datastructures import QueryParams

from outbox.administration.checks.locks import read_consumers
from outbox.administration.checks.sessions import sees_all_sessions
from outbox.administration.connection import AdministrationConnection
from outbox.lane import LANES
from outbox.postgres.advisory_lock import LOCK_CLASS, consumer_class
from outbox.postgres.sql_files import load
from outbox.web.frame import Section

_RELAY: Final = "pillarbox relay "
_CONSUMER: Final = "pillarbox inbox "
_PARTS: Final = ("lease", "sweep", "oversized", "doorbell", "worker", "bell")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    pid: int
    name: str
    role: str | None
    client: str | None
    since: datetime | None
    lanes: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process of ours, as its sessions show it.

    Attributes:
        name: of a relay its host and process; of a consumer its own.
        replicas: how many hold or wait for lanes.
        since: when the first of its sessions began; None if that can't be seen.
    """

    kind: str
    name: str
    replicas: int
    sessions: int
    roles: str
    clients: str
    since: datetime | None
    lanes: tuple[int, ...]


def read_page(
    connection: AdministrationConnection, query: QueryParams
) -> dict[str, Any]:
    """Read who is connected now."""
    del query
    consumers = read_consumers(connection)
    classes = [LOCK_CLASS, *(consumer_class(name) for name in consumers)]
    with connection.cursor(row_factory=class_row(_Session)) as cursor:
        sessions = cursor.execute(
            load("outbox", "list_processes"),
            {"classes": [number & 0xFFFF_FFFF for number in classes]},
        ).fetchall()
    processes = _processes(sessions)
    held = {lane for it in processes if it.kind == "relay" for lane in it.lanes}
    running = {it.name for it in processes if it.kind == "consumer"}
    sees_all, role = sees_all_sessions(connection)
    return {
        "processes": [it for it in processes if it.kind != "command"],
        "commands": [it for it in processes if it.kind == "command"],
        "free": sorted(set(range(LANES)) - held),
        "lanes": LANES,
        # An application_name has at most 63 bytes.
        "silent": [
            name
            for name in consumers
            if not any(name == it or _is_cut(it, name) for it in running)
        ],
        "sees_all": sees_all,
        "role": role,
    }


def _is_cut(shown: str, name: str) -> bool:
    return len((_CONSUMER + shown).encode()) > 56 and name.startswith(shown)


def _processes(sessions: Sequence[_Session]) -> list[Process]:
    groups: dict[tuple[str, str], list[_Session]] = {}
    for session in sessions:
        groups.setdefault(_identity(session.name), []).append(session)
    return [
        Process(
            kind=kind,
            name=name,
            replicas=sum(it.name.endswith(" lease") for it in group) or 1,
            sessions=len(group),
            roles=", ".join(sorted({it.role or "unknown" for it in group})),
            clients=", ".join(sorted({it.client or "local" for it in group})),
            since=min((it.since for it in group if it.since), default=None),
            lanes=tuple(sorted({lane for it in group for lane in it.lanes})),
        )
        for (kind, name), group in groups.items()
    ]


def _identity(name: str) -> tuple[str, str]:
    for kind, prefix in (("relay", _RELAY), ("consumer", _CONSUMER)):
        if name.startswith(prefix):
            rest, _, last = name.removeprefix(prefix).rpartition(" ")
            return kind, rest if last in _PARTS and rest else name.removeprefix(prefix)
    return "command", name


SECTION: Final = Section(
    path="processes", title="Processes", shortcut="r", read=read_page
)
