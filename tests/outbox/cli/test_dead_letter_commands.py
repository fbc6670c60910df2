"""`pillarbox dead-letters`: one set of commands for the tables of both sides."""

import json
import re
import shlex
from base64 import b64decode
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pytest

from pillarbox import Message
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.dead_letters import inspect
from pillarbox.outbox.dead_letters.statement import Schema
from tests.acceptance.relays import as_role
from tests.fixtures.dead_letters import give_up, states
from tests.fixtures.foreign_messages import DEEP
from tests.fixtures.sessions import execute

NOBODY = "01900000-0000-7000-8000-000000000000"


class Side(NamedTuple):
    schema: Schema
    url: str
    run: Callable[..., int]


@pytest.fixture(params=["outbox", "inbox"])
def side(
    request: pytest.FixtureRequest,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Side:
    """Return each side in turn, with the privileges of its role."""
    role = {"outbox": "pillarbox_relay", "inbox": "pillarbox_consumer"}[request.param]
    url = as_role(database_url, role)
    monkeypatch.setenv("PILLARBOX_DATABASE_URL", url)

    def run(action: str, *argv: str) -> int:
        return main(["dead-letters", action, f"--side={request.param}", *argv])

    return Side(request.param, database_url, run)


def topics_of(said: str) -> list[str]:
    return [letter["topic"] for letter in json.loads(said)]


def dead_letter_three(side: Side) -> None:
    give_up(side.url, Message("orders.placed", b"", key="k1"), schema=side.schema)
    give_up(
        side.url,
        Message("orders.paid", b"", tenant="acme"),
        schema=side.schema,
        age=timedelta(hours=2),
        reason="No such Customer",
    )
    give_up(
        side.url,
        Message("invoices", b""),
        schema=side.schema,
        age=timedelta(hours=30),
        origin="someone",
    )


FOUND = {
    "": ["orders.placed", "orders.paid", "invoices"],
    "--topic orders.paid": ["orders.paid"],
    "--topic orders.*": ["orders.placed", "orders.paid"],
    "--key k1": ["orders.placed"],
    "--tenant acme": ["orders.paid"],
    "--error 'no such customer'": ["orders.paid"],
    "--origin someone": ["invoices"],
    "--since 1h": ["orders.placed"],
    "--until 1d": ["invoices"],
    "--until 1h --since 1d": ["orders.paid"],
    "--limit 2": ["orders.placed", "orders.paid"],
    "--state discarded": [],
    "--state any": ["orders.placed", "orders.paid", "invoices"],
}


REFUSED = {
    "discard --reason r": "pass ids or a filter",
    "discard --error= --reason r": "pass ids or a filter",
    "discard --topic=* --reason ' '": "--reason is empty",
    f"discard {NOBODY} --topic=* --reason r": "pass ids or a filter",
    "list --since 1": "'--since': '1': write a moment",
    "list --limit 0": "'--limit': 0 is not in the range x>=1",
}


def test_list_shows_matching_dead_letters_newest_first(
    side: Side, capsys: pytest.CaptureFixture[str]
) -> None:
    assert side.run("list") == 0
    assert capsys.readouterr().out == "no dead letters\n"
    dead_letter_three(side)
    for filters, found in FOUND.items():
        assert side.run("list", "--json", *shlex.split(filters)) == 0
        assert (filters, topics_of(capsys.readouterr().out)) == (filters, found)
    assert side.run("list") == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["id", "age", "side", "status"]
    ages = [row.split()[1] for row in rows]
    assert re.fullmatch(r"\d+s", ages[0])  # it was stored just before
    assert ages[1:] == ["2h", "1d"]
    assert rows[1].endswith("No such Customer")
    for line, problem in REFUSED.items():
        assert side.run(*shlex.split(line)) == 2, line
        assert problem in capsys.readouterr().err


def test_the_monitor_can_list_dead_letters_but_reads_no_payload(
    side: Side, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (id, *_) = give_up(side.url, Message("t", b""), schema=side.schema)
    url = as_role(side.url, "pillarbox_monitor")
    monkeypatch.setenv("PILLARBOX_DATABASE_URL", url)
    assert side.run("list", "--json") == 0
    assert topics_of(capsys.readouterr().out) == ["t"]
    assert side.run("show", str(id)) == 2
    said = capsys.readouterr().err
    assert "permission denied" in said
    assert f"GRANT pillarbox_{'relay' if side.schema == 'outbox' else 'consumer'}" in (
        said
    )


def test_show_prints_everything_that_was_stored(
    side: Side, capsys: pytest.CaptureFixture[str]
) -> None:
    message = Message("t", {"order": 17}, headers={"traceparent": "00-1"})
    (id,) = give_up(
        side.url,
        message,
        schema=side.schema,
        stacktrace="Traceback\n  in \x1b[31mred",
    )
    assert side.run("show", str(id)) == 0
    said = capsys.readouterr().out
    assert '  "order": 17' in said
    assert '  "traceparent": "00-1"' in said
    assert "Traceback\n  in \\x1b[31mred" in said
    for known in (id, message.id):
        assert side.run("show", str(known), "--json") == 0
        shown = json.loads(capsys.readouterr().out)
        assert (shown["id"], shown["payload_json"]) == (str(id), {"order": 17})
    for typed in (NOBODY, "0b0e", ""):
        assert side.run("show", "--", typed) == 2, typed
        assert f"not found in {side.schema}.dead_letter" in capsys.readouterr().err


def nested(levels: int) -> str:
    """Return JSON that consists of nested brackets only."""
    return "[" * levels + "]" * levels


def test_show_prints_nested_payloads_as_json_and_too_deeply_nested_ones_as_text(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def stored(deep: str) -> str:
        message = Message("t", deep.encode(), content_type="application/json")
        (id,) = give_up(database_url, message, headers=deep)
        return str(id)

    def show(id: str, *argv: str) -> str:
        assert run(database_url, "show", id, *argv) == 0
        return capsys.readouterr().out

    not_shown = "not shown: they are not an object of strings, and over 1024 bytes"
    for deep, headers in ((DEEP, not_shown), (nested(101), nested(101))):
        id = stored(deep)
        said = show(id)
        assert said.count(deep) == [headers, deep].count(deep)
        assert headers in said
        shown = json.loads(show(id, "--json"))
        assert shown["headers"] == headers
        assert b64decode(shown["payload_base64"]) == deep.encode()
    deep = nested(100)
    shown = json.loads(show(stored(deep), "--json"))
    assert json.dumps(shown["headers"]) == json.dumps(shown["payload_json"]) == deep


def test_export_prints_one_json_line_each_and_discard_stores_who_decided_and_why(
    side: Side, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Memory has a page of them at a time, however many there are.
    monkeypatch.setattr(inspect, "_PAGE", 2)
    find, pages = inspect.DeadLetterTable.find, list[int]()

    def count(dead_letters: Any, criteria: Any) -> Any:
        found = find(dead_letters, criteria)
        pages.append(len(found))
        return found

    monkeypatch.setattr(inspect.DeadLetterTable, "find", count)
    dead_letter_three(side)
    give_up(side.url, Message("bytes", b"\xff"), schema=side.schema)
    assert side.run("export") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    topics = ["invoices", "orders.paid", "orders.placed", "bytes"]
    assert [line["topic"] for line in lines] == topics, "oldest first"
    assert lines[-1]["payload_base64"] == "/w=="
    assert pages == [2, 2, 0]

    argv = ("discard", "--topic", "orders.*", "--reason", "the shop is closed")
    assert side.run(*argv) == 0
    assert capsys.readouterr().out == "2 discarded\n"
    query = (
        "SELECT topic, discard_reason, discarded_by = session_user"
        f" FROM {side.schema}.dead_letter WHERE status = 'DISCARDED' ORDER BY 1"
    )
    assert execute(side.url, query) == [
        ("orders.paid", "the shop is closed", True),
        ("orders.placed", "the shop is closed", True),
    ]

    message = Message("orders", b"")
    ids = give_up(side.url, message, message, schema=side.schema)
    assert side.run("discard", str(message.id), "--reason", "old") == 2
    said = capsys.readouterr().err
    assert all(str(id) in said for id in ids), "a message has several dead letters"
    pending = f"SELECT id FROM {side.schema}.dead_letter WHERE status = 'PENDING'"
    assert {(id,) for id in ids} <= {*execute(side.url, pending)}


def test_a_reason_that_is_too_long_is_refused_by_name(
    side: Side, capsys: pytest.CaptureFixture[str]
) -> None:
    give_up(side.url, Message("t", b""), schema=side.schema)
    argv = ("discard", "--topic=t", "--reason")
    assert side.run(*argv, "x" * 4097) == 2
    assert "--reason" in (said := capsys.readouterr().err)
    assert "has 4,097 characters: use at most 4,096" in said
    assert side.run(*argv, "😀" * 4090 + "\udcff") == 0
    query = f"SELECT right(discard_reason, 7) FROM {side.schema}.dead_letter"
    assert execute(side.url, query) == [("😀\\udcff",)]


def test_a_redelivered_discarded_message_is_recognized(database_url: str) -> None:
    message = Message("orders", b"")
    give_up(database_url, message, schema="inbox")
    give_up(database_url, message, schema="inbox", message_id="sha256:00")
    long_ago = str(message.id).replace(str(message.id)[:8], "01800000")
    give_up(database_url, message, schema="inbox", message_id=long_ago)

    url = as_role(database_url, "pillarbox_consumer")
    argv = ["dead-letters", "discard", "--side=inbox", "--topic=*", "--reason=r"]
    assert main([*argv, "--database", url]) == 0
    query = "SELECT message_id, consumer FROM inbox.receipt"
    assert execute(database_url, query) == [(message.id, "billing")]
    assert {row[0] for row in states(database_url, "inbox")} == {"DISCARDED"}


def run(url: str, action: str, *argv: str) -> int:
    return main(["dead-letters", action, f"--database={url}", *argv])


def fill_both(url: str) -> list[str]:
    """Dead-letter a message on each side; return both ids, that of the outbox first."""
    (from_outbox,) = give_up(url, Message("sent", b"1"), age=timedelta(hours=1))
    (from_inbox,) = give_up(url, Message("handled", b"2"), schema="inbox")
    return [str(from_outbox), str(from_inbox)]


def test_without_a_side_commands_apply_to_both_sides(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = fill_both(database_url)
    monitor = as_role(database_url, "pillarbox_monitor")

    assert run(monitor, "list", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [(it["side"], it["topic"]) for it in found] == [
        ("inbox", "handled"),
        ("outbox", "sent"),
    ]
    assert run(monitor, "list", "--limit=1") == 0
    _, row = capsys.readouterr().out.splitlines()
    assert row.split()[2] == "inbox"
    assert run(database_url, "export") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [it["side"] for it in lines] == ["outbox", "inbox"]
    for id, its_side in zip(ids, ("outbox", "inbox"), strict=True):
        assert run(database_url, "show", id, "--json") == 0
        assert json.loads(capsys.readouterr().out)["side"] == its_side
    assert run(database_url, "show", NOBODY) == 2
    said = capsys.readouterr().err
    assert re.search(r"in outbox.dead_letter of \w+ or inbox.dead_letter of \w+;", said)
    relay = as_role(database_url, "pillarbox_relay")
    assert run(relay, "list") == 2
    assert "--side outbox or --side inbox" in capsys.readouterr().err
    assert run(relay, "list", "--side=outbox") == 0
    capsys.readouterr()
    assert run(database_url, "discard", "--topic=*", "--reason=old") == 0
    assert capsys.readouterr().out == "2 discarded\n"
    for schema in ("outbox", "inbox"):
        assert {status for status, *_ in states(database_url, schema)} == {"DISCARDED"}


APP = """
import os
from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker
from sqlalchemy.pool import NullPool
from pillarbox import Consumer
from pillarbox.outbox.postgres.connection import sqlalchemy_url

url = sqlalchemy_url(os.environ["TEST_URL"])
engine = create_engine(url, poolclass=NullPool)
consumer = Consumer("memory:", sessionmaker(engine), name="billing")


@consumer.handles("handled")
def handle(session, message):
    if message.payload == b"bad":
        raise ValueError("bad")
"""


@pytest.fixture
def consumer(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the option that names a consumer, with the privileges of its role."""
    # Modules stay imported, and this one names a database.
    name = f"retry_app_{uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(APP)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TEST_URL", as_role(database_url, "pillarbox_consumer"))
    return f"--consumer={name}:consumer"


def test_a_retry_skips_a_side_that_it_cannot_retry_and_says_why(
    database_url: str, consumer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fill_both(database_url)
    assert run(database_url, "retry", "--topic=*") == 2
    said = capsys.readouterr().err
    assert "no broker given" in said
    assert "pass --consumer MODULE:NAME" in said

    assert run(database_url, "retry", "--topic=*", "--broker=redis://127.0.0.1:1") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    done, reason = printed.err.splitlines()[-2:]
    assert done == "0 of 1 were done"
    assert reason.startswith("pillarbox: ")
    assert states(database_url, "outbox") == [("PENDING", 0, "refused")]

    assert run(database_url, "retry", "--topic=*", "--broker=memory:") == 0
    printed = capsys.readouterr()
    assert printed.out == "1 retried: 1 succeeded, 0 failed, 0 skipped\n"
    assert printed.err.startswith("pillarbox: skipped inbox dead letters: pass")
    assert [status for status, *_ in states(database_url, "outbox")] == ["SUCCEEDED"]
    assert [status for status, *_ in states(database_url, "inbox")] == ["PENDING"]

    give_up(database_url, Message("sent", b"1"))
    assert run(database_url, "retry", "--topic=*", "--broker=memory:", consumer) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("2 retried: 2 succeeded")


def test_the_relay_retries_with_the_publisher_of_the_broker(
    database_url: str, other_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [Message("orders", f"{n}".encode()) for n in range(3)]
    (id, *_) = give_up(database_url, *messages)
    url = as_role(database_url, "pillarbox_relay")
    argv = ("retry", "--side=outbox", f"--broker={other_url}")

    assert run(url, *argv, "--topic=*", "--dry-run") == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert run(url, *argv, "--limit", "1", "--dry-run") == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert run(url, *argv, str(id)) == 0
    assert capsys.readouterr().out == "1 retried: 1 succeeded, 0 failed, 0 skipped\n"
    assert run(url, *argv, "--topic=*", "--rate", "1000/s") == 0
    (sum_,) = capsys.readouterr().out.splitlines()
    assert sum_ == "2 retried: 2 succeeded, 0 failed, 0 skipped"
    delivered = "SELECT payload FROM outbox.message ORDER BY payload"
    assert execute(other_url, delivered) == [(b"0",), (b"1",), (b"2",)]


def test_the_inbox_retries_with_the_handlers_of_the_consumer(
    database_url: str, consumer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [Message("handled", b"good"), Message("handled", b"bad")]
    (_, bad) = give_up(database_url, *messages, schema="inbox")
    url = as_role(database_url, "pillarbox_consumer")
    argv = ("retry", "--side=inbox", consumer)
    why = f"{bad} of handled failed: ValueError: raised in handle ("

    assert run(url, *argv, "--topic=*") == 1
    said = capsys.readouterr().out
    assert said.startswith(why)
    assert said.endswith("\n2 retried: 1 succeeded, 1 failed, 0 skipped\n")
    assert run(url, *argv, "--error", "ValueError") == 1
    said = capsys.readouterr().out
    assert said.startswith(why)
    assert said.endswith("\n1 retried: 0 succeeded, 1 failed, 0 skipped\n")
    (*left, reason), handled = sorted(states(database_url, "inbox"))
    assert (left, handled) == (["PENDING", 2], ("SUCCEEDED", 0, "refused"))
    assert reason.startswith("ValueError: raised in handle (")
