"""Partitions: shown as a strip, with whatever holds them, and the upkeep."""

from typing import Any, Final

from starlette.datastructures import QueryParams

from pillarbox.outbox.administration.checks.upkeep import read_upkeep
from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.administration.doctor import run_checks
from pillarbox.outbox.administration.partitions import SIGNS, Partition, read_partitions
from pillarbox.outbox.administration.upkeep import plan_upkeep
from pillarbox.outbox.web.frame import Section

_SILENT: Final = {"hold", "attach"}
_MOST_COUNTED: Final = 1000


def read_page(
    connection: AdministrationConnection, query: QueryParams
) -> dict[str, Any]:
    """Read the partitions of every table, and the upkeep's last run and next steps."""
    del query
    steps = plan_upkeep(connection)
    tables = read_partitions(connection, steps)
    return {
        "signs": SIGNS,
        "tables": [
            {
                "policy": policy,
                "partitions": partitions,
                "bytes": sum(it.bytes for it in partitions),
                "places": _count(partitions),
                "problems": [
                    it for it in partitions if it.query or it.place == "default"
                ],
            }
            for policy, partitions in tables.items()
        ],
        "most_counted": _MOST_COUNTED,
        "upkeep": read_upkeep(connection),
        "findings": run_checks(connection, ["upkeep"]),
        "steps": [it for it in steps if it.step not in _SILENT],
    }


def _count(partitions: list[Partition]) -> dict[str, int]:
    counted = dict.fromkeys(SIGNS, 0)
    for partition in partitions:
        counted[partition.place] += 1
    return {place: count for place, count in counted.items() if count}


SECTION: Final = Section(path="partitions", title="Partitions", read=read_page)
