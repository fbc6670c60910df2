"""The printed plan of the upkeep."""

import re
from typing import Final

import pytest

from pillarbox.outbox.cli.main import main
from tests.fixtures.sessions import execute
from tests.outbox.administration.retiring import (
    EXPIRED,
    interrupt_a_detach,
    leave_detached,
)
from tests.outbox.administration.test_upkeep import (
    BREAK_A_CONDITION,
    add_old,
    drop_ahead,
    old_partition,
)

LINES: Final = re.compile(r"(?m)^(\w+) +(\S+?)(?: from .*)?: (.*)\n {10}(.*)$")
LATE: Final = "its retention of 7 days is over, and nothing in it is unsettled"
HELD: Final = "unsettled rows: 1 (unclaimed), for example"
WHY: Final = {
    "make": "there is no partition for these rows",
    "attach": HELD,
    "drop": LATE,
    "finalize": "its detach is waiting for a transaction, or was interrupted",
    "detach": LATE,
    "hold": HELD,
    "trim": "rows older than the retention of inbox.receipt, 14 days",
}
UNKNOWN: Final = (
    'its unsettled rows can\'t be found: column "no_such_column" does not exist'
)
OLD_FOREIGN_RECEIPT: Final = (
    "INSERT INTO inbox.foreign_receipt VALUES"
    " ('stripe', 'a', 'billing', now() - 15 * interval '24 hours')"
)


def oldest(url: str, table: str) -> str:
    query = "SELECT partition::text FROM outbox.partitions(%s) LIMIT 1"
    ((partition,),) = execute(url, query, [table])
    return str(partition)


@pytest.mark.week
def test_a_dry_run_prints_each_step_with_its_reason_and_sql(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = database_url
    command = ["maintain", "--dry-run", "--database", url]
    assert main(command) == 0
    assert capsys.readouterr().out == "nothing to do\n"
    drop_ahead(url)
    attached = leave_detached(url, 35, outcome=None)
    dropped = leave_detached(url, 30, outcome="published")
    old_partition(url, 25)
    detached = oldest(url, "outbox.message")
    old_partition(url, 20)
    add_old(url, 20)
    _, held = (partition for (partition,) in execute(url, EXPIRED))
    old_partition(url, table="inbox.receipt")
    finalized = oldest(url, "inbox.receipt")
    interrupt_a_detach(url, finalized, "inbox.receipt")
    old_partition(url, table="inbox.job")
    untold = oldest(url, "inbox.job")
    execute(url, BREAK_A_CONDITION)
    execute(url, OLD_FOREIGN_RECEIPT)
    before = execute(url, EXPIRED)

    assert main(command) == 0

    printed = LINES.findall(capsys.readouterr().out)
    assert [(step, subject) for step, subject, _, _ in printed] == [
        ("hold", untold),
        ("finalize", finalized),
        ("make", "outbox.message"),
        ("attach", attached),
        ("drop", dropped),
        ("detach", detached),
        ("hold", held),
        ("trim", "inbox.foreign_receipt"),
    ]
    assert printed[0][2] == UNKNOWN
    # The rest of the reason names such a row.
    assert {
        step: reason.removesuffix(" (1 rows)").partition(" 0")[0]
        for step, _, reason, _ in printed[1:]
    } == WHY
    assert execute(url, EXPIRED) == before

    for step, subject, _, statement in printed[1:]:
        told = execute(f"{url}?options=-crole%3Dpillarbox_owner", statement)
        assert step != "hold" or len(told) == 1, subject
    assert main(command) == 0
    left = LINES.findall(capsys.readouterr().out)
    following = {f"outbox.{t}_p" for t in ("deferral", "position")}
    others = [
        (step, subject)
        for step, subject, _, _ in left
        if not subject.startswith(tuple(following))
    ]
    assert others == [("hold", untold), ("hold", attached), ("hold", held)]
    # Two days of messages are gone, and what was recorded of them follows.
    assert [step for step, _, _, _ in left if step == "detach"] == ["detach"] * 4


def test_json_without_a_dry_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["maintain", "--json", "--database", "postgresql://h/d"]) == 2
    assert "only --dry-run has a list to print" in capsys.readouterr().err
