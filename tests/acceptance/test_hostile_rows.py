"""Hostile rows from a role with INSERT neither exhaust memory nor delay others."""

import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import Relays, as_role
from tests.fixtures.hostile_rows import (
    ROWS,
    Rows,
    insert_charged,
    insert_incompressible,
    insert_rows,
)
from tests.fixtures.waiting import wait_for

MIB = 1024 * 1024
MOST_MEMORY = 256 * MIB
NEIGHBOURS = 64
neighbours = ((NEIGHBOURS, {"topic": "'neighbour'", "key": "'neighbour ' || n"}),)
UNSETTLED = (
    "topic <> 'neighbour' AND state NOT IN ('published', 'dead_lettered', 'scheduled')"
)
WHOLE = (
    "outbox.dead_letter d JOIN outbox.message m ON m.id::text = d.message_id"
    " WHERE m.payload = d.payload AND m.headers <@ d.headers"
)


def fewest(rows: Iterable[Rows]) -> Iterator[Rows]:
    """Yield a third of the largest rows, which are still more than `MOST_MEMORY`."""
    for count, odd in rows:
        yield (count // 3 if "{size}" in "".join(odd.values()) else count), odd


def peak_memory(pid: int) -> int:
    """Return the peak memory of a process, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def arrived(inspection: Inspection) -> bool:
    arrived = "outbox.message_status WHERE topic = 'neighbour' AND state = 'published'"
    return inspection.count(arrived) == NEIGHBOURS


def settled(inspection: Inspection) -> bool:
    return inspection.count(f"outbox.message_status WHERE {UNSETTLED}") == 0


def memory_of_settling(relays: Relays, inspection: Inspection, *options: str) -> int:
    """Return the peak memory of a relay that settles all messages."""
    relay = relays.start("memory://drop", *options)
    wait_for("the neighbours arrive", partial(arrived, inspection), seconds=200)
    wait_for("all is settled", partial(settled, inspection), seconds=200)
    return peak_memory(relay.pid)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_hostile_rows_of_every_kind_cost_little_memory_and_are_all_settled(
    relays: Relays, inspection: Inspection
) -> None:
    url = inspection.url
    insert_rows(as_role(url, "pillarbox_application"), (*fewest(ROWS), *neighbours))
    insert_charged(url)

    memory = memory_of_settling(relays, inspection, "--max-attempts=1")
    assert memory < MOST_MEMORY
    # Nothing is lost: oversized messages are dead-lettered whole.
    assert inspection.count(f"{WHOLE} AND octet_length(m.payload) > {8 * MIB}") == 6


@pytest.mark.timeout(300)
def test_messages_behind_oversized_rows_do_not_wait(
    relays: Relays, inspection: Inspection
) -> None:
    application = as_role(inspection.url, "pillarbox_application")
    insert_incompressible(application, 8, 12 * MIB)
    insert_rows(application, neighbours)

    assert memory_of_settling(relays, inspection) < MOST_MEMORY // 2
    # They arrived before the last of the oversized messages was dead-lettered.
    assert inspection.rows(
        "SELECT max(published_at) FILTER (WHERE topic = 'neighbour')"
        "       < max(dead_lettered_at) FROM outbox.message_status"
    ) == [(True,)]
    # Nothing is lost, and no schedule loads them: they must be retried by hand.
    assert inspection.count(f"{WHOLE} AND d.retry_after IS NULL") == 8
