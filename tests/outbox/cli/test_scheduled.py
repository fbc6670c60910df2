"""`pillarbox scheduled` lists, cancels and moves scheduled messages."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pillarbox import Message
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.message_id import uuid7
from tests.acceptance.relays import as_role
from tests.fixtures.positions import defer
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute

STATES = "SELECT id, state FROM outbox.message_status ORDER BY seq"


def at(hours: int, topic: str = "t", **details: Any) -> Message:
    due_at = datetime.now(UTC) + timedelta(hours=hours)
    return Message(topic, b"", available_at=due_at, **details)


def listed(
    url: str, capsys: pytest.CaptureFixture[str], *arguments: str
) -> list[dict[str, Any]]:
    url = as_role(url, "pillarbox_monitor")
    command = ["scheduled", "list", "--json", "--database", url, *arguments]
    assert main(command) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def change(url: str, *arguments: str) -> int:
    return main(
        ["scheduled", *arguments, "--database", as_role(url, "pillarbox_operator")]
    )


@pytest.mark.parametrize("is_claimed", [False, True])
def test_scheduled_messages_are_listed_in_the_order_in_which_they_are_due(
    database_url: str, capsys: pytest.CaptureFixture[str], is_claimed: bool
) -> None:
    later, sooner = at(3, "a.b", key="k"), at(2, "a.c", tenant="acme")
    insert(database_url, later, sooner, Message("now", b""), at(-1, "past"))
    if is_claimed:
        defer(database_url, "scheduled", "topic = 'a.b'", seconds=10800)
        defer(database_url, "scheduled", "topic = 'a.c'", seconds=7200)
    sorted_ids = [str(it.id) for it in (sooner, later)]
    assert [it["id"] for it in listed(database_url, capsys)] == sorted_ids
    for arguments, ids in {
        ("--limit", "1"): sorted_ids[:1],
        ("--topic", "a.*"): sorted_ids,
        ("--topic", "a.b"): sorted_ids[1:],
        ("--key", "k"): sorted_ids[1:],
        ("--tenant", "acme"): sorted_ids[:1],
    }.items():
        found = listed(database_url, capsys, *arguments)
        assert (arguments, [it["id"] for it in found]) == (arguments, ids)
        assert {(*it["readers"], it["priority"]) for it in found} == {
            ("main", "default")
        }

    url = as_role(database_url, "pillarbox_monitor")
    assert main(["scheduled", "list", "--database", url]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[:3] for row in rows] == [
        [sorted_ids[0], "1h", "a.c"],
        [sorted_ids[1], "2h", "a.b"],
    ]


def test_a_message_that_nobody_gets_is_listed_too_until_it_is_cancelled(
    unread_database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = at(1)
    insert(unread_database_url, message)
    (found,) = listed(unread_database_url, capsys)
    assert (found["id"], found["readers"]) == (str(message.id), [])
    assert change(unread_database_url, "cancel", str(message.id)) == 0
    capsys.readouterr()
    assert listed(unread_database_url, capsys) == []


def test_messages_are_cancelled_and_the_trace_says_by_whom_and_why(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other, due = at(1), at(2), Message("t", b"")
    insert(database_url, one, other, due)
    ids = [str(it.id) for it in (one, other)]
    assert change(database_url, "cancel", *ids, "--reason", "withdrawn") == 0
    assert capsys.readouterr().out.splitlines() == [f"{it} is cancelled" for it in ids]

    unknown = str(uuid7())
    assert change(database_url, "cancel", ids[0], str(due.id), unknown) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{ids[0]} was already cancelled: nothing was changed",
        f"{due.id} is due, or was not scheduled: ready at main",
        f"{unknown}: no message has this id",
    ]
    url = as_role(database_url, "pillarbox_monitor")
    assert main(["trace", ids[0], "--database", url]) == 0
    head, state, *steps = capsys.readouterr().out.splitlines()
    assert (head.split()[0], state) == ("t", "cancelled")
    (step,) = [it for it in steps if " cancelled " in it]
    ((user,),) = execute(database_url, "SELECT session_user")
    assert user in step
    assert "withdrawn" in step


def test_all_messages_are_moved_or_none(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    far, near = at(2), at(1)
    insert(database_url, far, near)
    execute(
        database_url,
        "UPDATE outbox.message SET available_at = created_at + interval '20 days'"
        " WHERE id = %s",
        [far.id],
    )
    assert change(database_url, "move", str(far.id), str(near.id), "--in", "9d") == 2
    assert f"{near.id}: outbox.move: available_at is" in capsys.readouterr().err
    states = [state for _, state in execute(database_url, STATES)]
    assert states == ["scheduled", "scheduled"]


def test_a_message_is_moved_and_nothing_is_changed_if_it_can_not_be(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = at(1, key="k")
    insert(database_url, message)
    id = str(message.id)
    for options, problem in {
        (): "pass either --to MOMENT or --in DURATION",
        ("--to", "2026-01-31T14:00Z", "--in", "2h"): "pass either",
        ("--to", "2h"): "is past",
        ("--to", "2020-01-31T14:00Z"): "--in 0s publishes it now",
        ("--to", "tomorrow"): "with its time zone",
        ("--in", "7d"): "more than 6 days ahead",
    }.items():
        assert change(database_url, "move", id, *options) == 2
        assert problem in capsys.readouterr().err
    assert execute(database_url, STATES) == [(message.id, "scheduled")]

    assert change(database_url, "move", id, "--in", "2h") == 0
    (_, (new, state)) = execute(database_url, STATES)
    said = f"{id} is cancelled, and {new} replaces it\n"
    assert (capsys.readouterr().out, state) == (said, "scheduled")
    assert change(database_url, "move", id, "--in", "2h") == 1
    assert "nothing was changed" in capsys.readouterr().out
    assert change(database_url, "move", str(new), "--in", "0s") == 0
    assert [state for _, state in execute(database_url, STATES)] == [
        "cancelled",
        "cancelled",
        "ready",
    ]


def test_who_may_not_cancel_is_told_what_it_takes(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = at(1)
    insert(database_url, message)
    url = as_role(database_url, "pillarbox_monitor")
    assert main(["scheduled", "cancel", str(message.id), "--database", url]) == 2
    assert "pillarbox_operator" in capsys.readouterr().err
