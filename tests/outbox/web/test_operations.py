"""Actions on the page: counted first, one at a time, and recorded."""

import os
import re
import socket
import urllib.parse
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from pillarbox import Message
from pillarbox.outbox.postgres.connection import conninfo, sqlalchemy_url
from pillarbox.relay.publishers.memory import MemoryPublisher
from tests.fixtures.dead_letters import give_up, states
from tests.fixtures.presence import record_process
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for
from tests.fixtures.web import ANN, BOB, Browser, as_role, browsing, served
from tests.outbox.web.test_command import log_in
from tests.outbox.web.test_dead_letters import shown

BLOCKING = """
from sqlalchemy import create_engine, text
from sqlalchemy.orm import sessionmaker
from sqlalchemy.pool import NullPool

from pillarbox import Consumer

engine = create_engine({!r}, poolclass=NullPool)
consumer = Consumer("memory:", sessionmaker(engine), name="billing")


@consumer.handles("handled")
def handle(session, message):
    insert = text("INSERT INTO effect VALUES (:id)")
    session.execute(insert, {{"id": str(message.id)}})
    lock = text("SELECT pg_advisory_xact_lock(:n)")
    session.execute(lock, {{"n": int(message.payload)}})
"""


def plan(browser: Browser, kind: str, **chosen: str) -> str:
    """Ask for a dry run of an action."""
    return shown(browser.post_raw("/dead-letters/plan", {"kind": kind, **chosen}))


def operations(url: str) -> list[Any]:
    columns = "kind, state, reason, asked_by, expected, succeeded, failed, skipped"
    return execute(url, f"SELECT {columns} FROM outbox.operation ORDER BY asked_at")


OPERATIONS = "/operations"


def test_what_a_dry_run_counted_is_discarded_on_both_sides_and_who_asked_is_recorded(
    database_url: str,
) -> None:
    give_up(database_url, *[Message("a", 1)] * 3, Message("b", 1))
    give_up(database_url, Message("a", 1), schema="inbox")
    with browsing(as_role(database_url, "pillarbox_web")) as browser:
        text = plan(browser, "discard", topic="a")
        assert "Discard 4 dead letters?" in text
        assert "Nothing has been done yet." in text
        assert {status for status, _, _ in states(database_url)} == {"PENDING"}
        assert operations(database_url) == []
        give_up(database_url, Message("a", 1), reason="later")
        browser.post("/operations/ask", why="a probe")
        browser.wait_until_shown(OPERATIONS, "<td>done</td>")
    done = ("discard", "done", "a probe", "ann", 4, 4, 0, 0)
    assert operations(database_url) == [done]
    query = "SELECT discard_reason, discarded_by = session_user || ' for ann'"
    for schema, count in (("outbox", 3), ("inbox", 1)):
        discarded = f"{query} FROM {schema}.dead_letter WHERE status = 'DISCARDED'"
        assert execute(database_url, discarded) == [("a probe", True)] * count
    assert execute(database_url, "SELECT count(*) FROM inbox.receipt") == [(1,)]
    left = "SELECT topic, error_reason FROM outbox.dead_letter WHERE status = 'PENDING'"
    assert sorted(execute(database_url, left)) == [("a", "later"), ("b", "refused")]


def test_one_dead_letter_is_discarded_and_the_others_are_not(database_url: str) -> None:
    ids = give_up(database_url, Message("a", 1), Message("b", 1))
    with browsing(database_url) as browser:
        browser.get(f"/dead-letters/outbox/{ids[1]}")
        assert "Discard 1 dead letter?" in browser.post(
            "/dead-letters/plan", kind="discard"
        )
        browser.post("/operations/ask", why="it is wrong")
        browser.wait_until_shown(OPERATIONS, "<td>done</td>")
    assert [status for status, _, _ in states(database_url)] == ["PENDING", "DISCARDED"]


def test_a_retry_publishes_the_messages_of_a_side_and_refuses_one_that_it_cannot_retry(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = MemoryPublisher()
    monkeypatch.setattr(
        "pillarbox.relay.publishers.memory.MemoryPublisher.from_url",
        lambda _: publisher,
    )
    give_up(database_url, Message("a", 1), Message("a", 2))
    give_up(database_url, Message("a", 1), schema="inbox")
    with browsing(database_url, broker="memory://") as browser:
        for side in ({}, {"side": "inbox"}):
            assert "--consumer" in plan(browser, "retry", **side)
            assert browser.status == 400
        assert "Retry 2 dead letters?" in plan(browser, "retry", side="outbox")
        browser.post("/operations/ask")
        browser.wait_until_shown(OPERATIONS, "<td>done</td>")
    assert operations(database_url) == [("retry", "done", "", "ann", 2, 2, 0, 0)]
    assert [status for status, _, _ in states(database_url)] == ["SUCCEEDED"] * 2
    assert [status for status, _, _ in states(database_url, "inbox")] == ["PENDING"]


def test_those_that_were_checked_are_retried_and_no_others(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = MemoryPublisher()
    monkeypatch.setattr(
        "pillarbox.relay.publishers.memory.MemoryPublisher.from_url",
        lambda _: publisher,
    )
    give_up(database_url, *[Message("a", n) for n in range(4)])
    give_up(database_url, Message("a", 9), schema="inbox")
    with browsing(database_url, broker="memory://") as browser:
        boxes = re.findall(r'type="checkbox"[^>]* value="([^"]+)"', browser.get("/"))
        assert boxes == []
        text = browser.get("/dead-letters?side=outbox")
        boxes = re.findall(r'type="checkbox"[^>]* value="([^"]+)"', text)
        assert len(boxes) == 4
        form = f"kind=retry&id={boxes[1]}&id={boxes[2]}"
        headers = {"content-type": "application/x-www-form-urlencoded"}
        answer = browser.client.post(
            "/dead-letters/plan", content=form, headers=headers
        )
        assert "Retry 2 dead letters?" in answer.text
        assert "2 chosen" in answer.text
        browser.text = answer.text
        browser.post("/operations/ask")
        browser.wait_until_shown(OPERATIONS, "<td>done</td>")
    left = "SELECT id::text FROM outbox.dead_letter WHERE status = 'PENDING'"
    assert {id for (id,) in execute(database_url, left)} == {boxes[0], boxes[3]}
    with browsing(database_url, token=BOB) as browser:
        assert "checkbox" not in browser.get("/dead-letters")


@pytest.mark.parametrize("kind", ["retry", "discard"])
def test_nothing_is_planned_if_none_is_checked(database_url: str, kind: str) -> None:
    give_up(database_url, Message("a", 1))
    with browsing(database_url, broker="memory://") as browser:
        form = browser.get("/dead-letters").partition('id="pick"')[2]
        (hidden,) = re.findall(r'"hidden" name="(\w+)" value=""', form)
        assert "none is checked" in plan(browser, kind, **{hidden: ""})
        assert browser.status == 400


def test_all_with_the_reason_or_of_the_topic_are_chosen_where_they_are_seen(
    database_url: str,
) -> None:
    ids = give_up(database_url, Message("a", 1), Message("b", 1), reason="why")
    give_up(database_url, Message("a", 1), reason="another")
    with browsing(database_url) as browser:
        for path in ("/dead-letters", f"/dead-letters/outbox/{ids[0]}"):
            forms = re.findall(r"<form.*?</form>", browser.get(path), re.DOTALL)
            (form,) = (it for it in forms if 'name="reason" value="why"' in it)
            fields = dict(re.findall(r'name="(\w+)" value="([^"]*)"', form))
            fields.pop("kind", None)
            text = plan(browser, "discard", **fields)
            assert "Discard 2 dead letters?" in text
        browser.get(f"/dead-letters/outbox/{ids[0]}")
        assert "of this topic" in browser.text
        text = plan(browser, "discard", **browser.hidden())
        assert "Discard 2 dead letters?" in text
        assert "topic a" in text


def test_a_retry_says_whose_handlers_run_and_warns_if_a_newer_consumer_runs(
    database_url: str, blocking: str
) -> None:
    record_process(database_url, "consumer", "billing", host="old 1")
    older = "UPDATE inbox.process SET since = now() - interval '9 days'"
    with browsing(database_url, consumer=blocking) as browser:
        execute(database_url, older)
        text = plan(browser, "retry", side="inbox")
        assert f"host {socket.gethostname()} {os.getpid()}" in text
        assert "host old 1" in text
        assert "Warning" not in text
        record_process(database_url, "consumer", "billing", host="new 1")
        text = plan(browser, "retry", side="inbox")
        assert "host new 1" in text
        assert "its handlers may be older" in text
        assert "host new 1" not in plan(browser, "discard", side="inbox")


@pytest.fixture
def blocking(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A consumer whose handler waits for the advisory lock that a payload names."""
    # Modules stay imported, and this one names a database.
    name = f"web_app_{uuid4().hex}"
    file = tmp_path / f"{name}.py"
    file.write_text(BLOCKING.format(sqlalchemy_url(database_url)))
    monkeypatch.syspath_prepend(tmp_path)
    execute(database_url, "CREATE TABLE effect (message text)")
    for n in range(5):
        age = timedelta(seconds=5 - n)
        give_up(database_url, Message("handled", n, key="k"), schema="inbox", age=age)
    return f"{name}:consumer"


WAITS = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"


def test_one_operation_runs_at_a_time_and_can_be_stopped_from_another_process(
    database_url: str, blocking: str
) -> None:
    with (
        psycopg.connect(conninfo(database_url)) as holder,
        browsing(database_url, consumer=blocking) as browser,
        browsing(database_url, consumer=blocking) as other,
    ):
        holder.execute("SELECT pg_advisory_lock(3), pg_advisory_lock(4)")
        plan(browser, "retry", side="inbox")
        browser.post("/operations/ask")
        wait_for("3", lambda: execute(database_url, WAITS) == [(1,)], seconds=90)

        plan(other, "discard")
        refused = shown(other.post("/operations/ask", why="w"))
        assert "another operation is running" in refused
        assert ">Stop<" in other.get(OPERATIONS)
        ((id,),) = execute(database_url, "SELECT id FROM outbox.operation")
        other.post_raw("/operations/stop", {"id": str(id)})
        assert "stopping, by ann" in shown(other.text)

        holder.execute("SELECT pg_advisory_unlock(3)")
        # With the number of those that succeeded it has also read that it must stop.
        wait_for("4", lambda: operations(database_url)[0][5] == 4, seconds=90)
        holder.execute("SELECT pg_advisory_unlock(4)")
        browser.wait_until_shown(OPERATIONS, "<td>stopped, by ann</td>")
    succeeded = operations(database_url)[0][5]
    assert succeeded in (4, 5)
    assert execute(database_url, "SELECT count(*) FROM effect") == [(succeeded,)]


def test_an_operation_ends_with_its_process_and_what_is_left_can_be_retried(
    database_url: str, blocking: str, tmp_path: Path
) -> None:
    give_up(database_url, Message("unknown", 1), schema="inbox")
    tokens = tmp_path / "tokens"
    tokens.write_text(f"ann {ANN.replace(' ', '-')} act\n")
    options = ("--tokens", str(tokens), "--consumer")
    with (
        psycopg.connect(conninfo(database_url)) as holder,
        served(
            database_url,
            tmp_path / "log",
            *options,
            blocking,
            PYTHONPATH=str(tmp_path),
        ) as (process, site),
    ):
        holder.execute("SELECT pg_advisory_lock(3)")
        client = log_in(site, ANN.replace(" ", "-"))

        def submit(path: str, page: str, **fields: str) -> str:
            hidden = re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', page)
            data = urllib.parse.urlencode({**dict(hidden), **fields}).encode()
            text: bytes = client.open(f"{site}{path}", data).read()
            return text.decode()

        page = submit("/dead-letters/plan", "", kind="retry", side="inbox")
        submit("/operations/ask", page)
        wait_for("3", lambda: execute(database_url, WAITS) == [(1,)], seconds=90)
        process.kill()
    with browsing(database_url, consumer=blocking) as browser:
        text = shown(browser.get(OPERATIONS))
        assert "failed" in text
        assert "the process that ran it has ended" in text
        assert ">Stop<" not in browser.text
        assert "Retry 3 dead letters?" in plan(browser, "retry", side="inbox")
        browser.post("/operations/ask")
        browser.wait_until_shown("/operations", "<td>done</td>")
    last = operations(database_url)[-1]
    assert last == ("retry", "done", "", "ann", 3, 2, 1, 0), "nobody handles the last"
    *handled, unknown = states(database_url, "inbox")
    assert {status for status, _, _ in handled} == {"SUCCEEDED"}
    assert unknown[:2] == ("PENDING", 1)
    assert execute(database_url, "SELECT count(*) FROM effect") == [(5,)]


REFUSED: list[tuple[dict[str, str], str]] = [
    ({"why": ""}, "the reason is empty"),
    ({"why": " "}, "the reason is empty"),
    ({"why": "x" * 2049}, "at most 2048"),
    ({"why": "\0"}, "without NUL characters"),
    ({"why": "w", "kind": "delete"}, "use retry, discard"),
    ({"why": "w", "until": ""}, "not the result of a dry run"),
    ({"why": "w", "until": "soon"}, "until 'soon'"),
]


def test_an_incomplete_request_is_refused(database_url: str) -> None:
    give_up(database_url, Message("a", 1))
    with browsing(database_url) as browser:
        for fields, said in REFUSED:
            plan(browser, "discard")
            assert said in shown(browser.post("/operations/ask", **fields))
            assert (said, browser.status) == (said, 400)
    assert operations(database_url) == []


def test_only_what_a_dry_run_counted_is_carried_out(database_url: str) -> None:
    give_up(database_url, Message("a", 1))
    with browsing(database_url) as browser:
        asked = {"kind": "discard", "why": "w", "until": "2999-01-01T00:00+00:00"}
        browser.post_raw("/operations/ask", asked)
        assert browser.status == 400
        for changed in ({"topic": "b"}, {"expected": "2"}, {"kind": "retry"}):
            plan(browser, "discard", topic="a")
            browser.post("/operations/ask", why="w", **changed)
            assert (changed, browser.status) == (changed, 400)
        assert "not the result of a dry run" in shown(browser.text)
    assert operations(database_url) == []


def test_an_operation_fails_with_the_reason_if_the_broker_is_unreachable(
    database_url: str,
) -> None:
    give_up(database_url, Message("a", 1))
    with browsing(database_url, broker="redis://127.0.0.1:1") as browser:
        plan(browser, "retry", side="outbox")
        browser.post("/operations/ask")
        browser.wait_until_shown(OPERATIONS, "<td>failed: ")
        assert "127.0.0.1:1" in browser.text
    assert states(database_url) == [("PENDING", 0, "refused")]


def test_an_operation_whose_selection_is_unknown_does_not_empty_the_list(
    database_url: str,
) -> None:
    insert = (
        "INSERT INTO outbox.operation (kind, selection, reason, asked_by, expected)"
        " VALUES ('retry', %s, 'w', 'ann', 1)"
    )
    for selection in ('{"window": "a fortnight"}', '{"side": "outbox"}'):
        execute(database_url, insert, [selection])
    with pytest.raises(psycopg.errors.CheckViolation, match="selection_of_strings"):
        execute(database_url, insert, ["[]"])
    with browsing(database_url) as browser:
        text = shown(browser.get("/operations"))
    assert "window a fortnight" in text
    assert "side outbox" in text
