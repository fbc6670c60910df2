"""`pillarbox status`: what waits and what failed, on one screen."""

import json

import pytest

from outbox import Message
from outbox.cli.main import main
from tests.acceptance.relays import as_role
from tests.fixtures.dead_letters import give_up
from tests.fixtures.relay import execute, insert


def test_the_monitor_sees_what_waits_and_what_failed(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    insert(database_url, Message("orders", b""), Message("orders", b"", key="k"))
    insert(database_url, Message("orders", b"", key="later"))
    execute(
        database_url,
        "UPDATE outbox.message SET available_at = now() + interval '1 hour'"
        " WHERE key = 'later'",
    )
    give_up(database_url, Message("orders", b""), schema="inbox")
    monitor = as_role(database_url, "pillarbox_monitor")

    code = main(["status", "--json", "--database", monitor])

    said = json.loads(capsys.readouterr().out)
    assert said["status"] == code
    ours, theirs = said["waiting"]
    assert (ours["side"], ours["due"], ours["later"]) == ("outbox", 2, 1)
    assert ours["waited"] >= 0
    assert (ours["dead_letters"], theirs["dead_letters"]) == (0, 1)
    assert (theirs["due"], theirs["waited"]) == (0, None)
    (table,) = [t for t in said["partitions"] if t["table"] == "outbox.message"]
    # One fewer after midnight, until the next upkeep.
    assert table["ahead"] in {6, 7}


def test_the_answer_comes_first_and_has_the_doctors_status(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = main(["doctor", "--database", database_url])
    capsys.readouterr()
    assert main(["status", "--database", database_url]) == expected
    answer, _, head, *_ = capsys.readouterr().out.splitlines()
    assert answer == "all well" or "pillarbox doctor names the remedies" in answer
    assert head.split()[:2] == ["side", "due"]

    execute(database_url, "DROP FUNCTION outbox.upkeep_plan(text) CASCADE")
    assert main(["status", "--database", database_url]) in {2, 3}
