"""Actions on the page: counted first, undoable until they start, and recorded."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from outbox import Message
from outbox.administration.sides import RetryOptions
from outbox.postgres.connection import conninfo, sqlalchemy_url
from relay.publishers.memory import MemoryPublisher
from tests.fixtures.dead_letters import give_up, states
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for
from tests.fixtures.web import BOB, Browser, as_role, browsing, served
from tests.outbox.web.test_dead_letters import shown

CONSUMER = """
from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker
from sqlalchemy.pool import NullPool

from inbox import Consumer

engine = create_engine({!r}, poolclass=NullPool)
consumer = Consumer("memory:", sessionmaker(engine), name="billing")
consumer.handles("handled")(lambda session, message: None)
"""
BLOCKING = """
from sqlalchemy import create_engine, text
from sqlalchemy.orm import sessionmaker
from sqlalchemy.pool import NullPool

from inbox import Consumer

engine = create_engine({!r}, poolclass=NullPool)
consumer = Consumer("memory:", sessionmaker(engine), name="billing")


@consumer.handles("handled")
def handle(session, message):
    insert = text("INSERT INTO effect VALUES (:id)")
    session.execute(insert, {{"id": str(message.id)}})
    lock = text("SELECT pg_advisory_xact_lock(:n)")
    session.execute(lock, {{"n": int(message.payload)}})
"""
LATER = timedelta(hours=1)


def retries(url: str, **changes: Any) -> RetryOptions:
    options = {"broker": "memory://", "codec": None, "consumer": None, **changes}
    return RetryOptions(database=url, schedule=None, **options)


def plan(browser: Browser, kind: str, **chosen: str) -> str:
    """Ask for a dry run of an action."""
    browser.get("/dead-letters")
    hidden = {"form_token": browser.hidden()["form_token"]}
    return shown(
        browser.post_raw("/dead-letters/plan", {**hidden, "kind": kind, **chosen})
    )


def operation(url: str) -> Any:
    columns = "kind, state, reason, asked_by, expected, succeeded, failed, skipped"
    ((*row,),) = execute(url, f"SELECT {columns} FROM outbox.operation")
    return tuple(row)


def address(url: str) -> str:
    ((id,),) = execute(url, "SELECT id FROM outbox.operation")
    return f"/operation?id={id}"


def test_a_dry_run_counts_exactly_and_changes_nothing(database_url: str) -> None:
    give_up(database_url, *[Message("a", 1)] * 3, *[Message("b", 1)] * 2)
    with browsing(database_url) as browser:
        text = plan(browser, "discard", topic="a")
    assert "Discard 3 dead letters?" in text
    assert "Nothing has been done yet." in text
    assert {status for status, _, _ in states(database_url)} == {"PENDING"}
    assert execute(database_url, "SELECT * FROM outbox.operation") == []


@pytest.mark.parametrize("role", ["postgres", "pillarbox_web"])
def test_all_matches_on_both_sides_are_discarded_and_who_asked_is_recorded(
    database_url: str, role: str
) -> None:
    give_up(database_url, *[Message("a", 1)] * 3, Message("b", 1))
    give_up(database_url, Message("a", 1), schema="inbox")
    with browsing(as_role(database_url, role)) as browser:
        plan(browser, "discard", topic="a")
        browser.post("/operations/ask", why="a probe")
        browser.wait_until_shown(address(database_url), "</strong>: done")
    assert operation(database_url) == ("discard", "done", "a probe", "ann", 4, 4, 0, 0)
    query = "SELECT discard_reason, discarded_by = session_user || ' for ann'"
    for schema, count in (("outbox", 3), ("inbox", 1)):
        discarded = f"{query} FROM {schema}.dead_letter WHERE status = 'DISCARDED'"
        assert execute(database_url, discarded) == [("a probe", True)] * count
    assert execute(database_url, "SELECT count(*) FROM inbox.receipt") == [(1,)]


def test_dead_letters_that_appear_after_the_dry_run_are_left_alone(
    database_url: str,
) -> None:
    give_up(database_url, Message("a", 1))
    with browsing(database_url) as browser:
        plan(browser, "discard", window="all")
        give_up(database_url, Message("a", 1), reason="later")
        browser.post("/operations/ask", why="a probe")
        browser.wait_until_shown(address(database_url), "</strong>: done")
    assert [(s, reason) for s, _, reason in states(database_url)] == [
        ("DISCARDED", "refused"),
        ("PENDING", "later"),
    ]


def test_one_dead_letter_is_discarded_and_the_others_are_not(database_url: str) -> None:
    ids = give_up(database_url, Message("a", 1), Message("b", 1))
    with browsing(database_url) as browser:
        browser.get(f"/dead-letters/outbox/{ids[1]}")
        assert "Discard 1 dead letter?" in browser.post(
            "/dead-letters/plan", kind="discard"
        )
        browser.post("/operations/ask", why="it is wrong")
        browser.wait_until_shown(address(database_url), "</strong>: done")
    assert [status for status, _, _ in states(database_url)] == ["PENDING", "DISCARDED"]


def test_a_retry_publishes_the_messages(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = MemoryPublisher()
    monkeypatch.setattr(
        "relay.publishers.memory.MemoryPublisher.from_url", lambda _: publisher
    )
    give_up(database_url, Message("a", 1), Message("a", 2))
    with browsing(database_url, retry=retries(database_url)) as browser:
        assert "Retry 2 dead letters?" in plan(browser, "retry", side="outbox")
        browser.post("/operations/ask")
        browser.wait_until_shown(address(database_url), "</strong>: done")
    assert operation(database_url) == ("retry", "done", "", "ann", 2, 2, 0, 0)
    assert [status for status, _, _ in states(database_url)] == ["SUCCEEDED"] * 2


def test_a_retry_calls_the_handler_of_the_consumer(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "web_app_of_test.py").write_text(
        CONSUMER.format(sqlalchemy_url(database_url))
    )
    monkeypatch.syspath_prepend(tmp_path)
    give_up(database_url, Message("handled", 1), schema="inbox")
    give_up(database_url, Message("unknown", 1), schema="inbox")
    options = retries(database_url, consumer="web_app_of_test:consumer")
    with browsing(database_url, retry=options) as browser:
        assert "Retry 2 dead letters?" in plan(browser, "retry", side="inbox")
        browser.post("/operations/ask")
        browser.wait_until_shown(address(database_url), "</strong>: done")
    assert operation(database_url) == ("retry", "done", "", "ann", 2, 1, 1, 0)
    found = [(status, count) for status, count, _ in states(database_url, "inbox")]
    assert sorted(found) == [("PENDING", 1), ("SUCCEEDED", 0)]


def test_a_side_that_cannot_be_retried_is_left_out_and_named(
    database_url: str,
) -> None:
    give_up(database_url, Message("a", 1))
    give_up(database_url, Message("a", 1), schema="inbox")
    with browsing(database_url, retry=retries(database_url)) as browser:
        text = plan(browser, "retry")
        assert "Retry 1 dead letter?" in text
        assert "Those of the inbox are left out" in text
        assert "--consumer" in plan(browser, "retry", side="inbox")
        assert browser.status == 400


def test_an_operation_can_be_undone_until_it_starts(database_url: str) -> None:
    give_up(database_url, Message("a", 1))
    with browsing(database_url, undo=LATER) as browser:
        plan(browser, "discard")
        text = browser.post("/operations/ask", why="a slip")
        assert ">Undo<" in text
        id = address(database_url).partition("=")[2]
        token = browser.hidden()["form_token"]
        text = browser.post_raw("/operations/undo", {"form_token": token, "id": id})
        assert "undone, by ann" in shown(text)
        assert ">Undo<" not in text
    assert operation(database_url)[1] == "undone"
    assert [status for status, _, _ in states(database_url)] == ["PENDING"]


def test_another_process_continues_an_operation(database_url: str) -> None:
    give_up(database_url, Message("a", 1))
    with browsing(database_url, undo=LATER) as browser:
        plan(browser, "discard")
        browser.post("/operations/ask", why="why")
    execute(
        database_url,
        "UPDATE outbox.operation SET starts_at = now(), state = 'running',"
        " worker = 'dead:1', lease_until = now() - interval '1 s'",
    )
    with browsing(database_url) as browser:
        browser.wait_until_shown(address(database_url), "</strong>: done")
    assert [status for status, _, _ in states(database_url)] == ["DISCARDED"]


def test_a_killed_process_is_replaced_and_each_effect_happens_once(
    database_url: str, tmp_path: Path
) -> None:
    (tmp_path / "web_app_to_kill.py").write_text(
        BLOCKING.format(sqlalchemy_url(database_url))
    )
    execute(database_url, "CREATE TABLE effect (message text)")
    messages = [Message("handled", n, key="k") for n in range(5)]
    give_up(database_url, *messages, schema="inbox")
    execute(
        database_url,
        "INSERT INTO outbox.operation (kind, selection, reason, asked_by, expected)"
        " VALUES ('retry', '{\"side\": \"inbox\"}', '', 'ann', 5)",
    )
    options = ("--allow-actions", "--consumer", "web_app_to_kill:consumer")
    path = {"PYTHONPATH": str(tmp_path)}
    waits = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    with psycopg.connect(conninfo(database_url)) as holder:
        holder.execute("SELECT pg_advisory_lock(3)")
        # Nobody opens the page: the process finds the operation without a request.
        with served(database_url, tmp_path / "first", *options, **path) as (first, _):
            wait_for("3", lambda: execute(database_url, waits) == [(1,)], seconds=90)
            first.kill()
    query = "SELECT state, worker FROM outbox.operation"
    ((state, worker),) = execute(database_url, query)
    assert state == "running"
    assert worker.endswith(f":{first.pid}")
    # Simulate the end of the lease.
    execute(database_url, "UPDATE outbox.operation SET lease_until = now()")
    with served(database_url, tmp_path / "second", *options, **path) as (second, _):
        done = [("done", worker.replace(f":{first.pid}", f":{second.pid}"))]
        wait_for("done", lambda: execute(database_url, query) == done, seconds=90)
    assert execute(database_url, "SELECT message FROM effect ORDER BY message") == [
        *sorted((str(message.id),) for message in messages)
    ]
    assert {status for status, _, _ in states(database_url, "inbox")} == {"SUCCEEDED"}


def test_an_operation_is_left_to_the_process_that_leases_it(database_url: str) -> None:
    give_up(database_url, Message("a", 1))
    with browsing(database_url) as browser:
        execute(
            database_url,
            "INSERT INTO outbox.operation (kind, selection, reason, asked_by, expected,"
            " state, worker, lease_until) VALUES ('discard', '{\"topic\": \"a\"}', 'w',"
            " 'bob', 1, 'running', 'other:1', now() + interval '1 h')",
        )
        plan(browser, "discard", topic="none")
        # When this second operation is done, the process has seen the first one, too.
        execute(
            database_url,
            "INSERT INTO outbox.operation (kind, selection, reason, asked_by, expected)"
            " VALUES ('discard', '{\"topic\": \"none\"}', 'w', 'ann', 0)",
        )
        browser.wait_until_shown("/operations", "<td>done</td>")
    assert [status for status, _, _ in states(database_url)] == ["PENDING"]


def test_a_running_operation_is_stopped(database_url: str) -> None:
    give_up(database_url, Message("a", 1))
    with browsing(database_url, token=BOB, allow_actions=False) as browser:
        execute(
            database_url,
            "INSERT INTO outbox.operation (kind, selection, reason, asked_by, expected,"
            " state, worker, lease_until) VALUES ('discard', '{\"topic\": \"a\"}', 'w',"
            " 'bob', 1, 'running', 'other:1', now() - interval '1 h')",
        )
        assert "Stop" not in browser.get(address(database_url))
    # Its worker is gone, so the next process to take it sees that it has to stop.
    execute(database_url, "UPDATE outbox.operation SET state = 'stopping'")
    with browsing(database_url, undo=LATER) as browser:
        browser.wait_until_shown(address(database_url), "</strong>: stopped")
    assert [status for status, _, _ in states(database_url)] == ["PENDING"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"why": ""}, "the reason is empty"),
        ({"why": " "}, "the reason is empty"),
        ({"why": "x" * 501}, "at most 500"),
        ({"why": "\0"}, "without NUL characters"),
        ({"why": "w", "kind": "delete"}, "use retry or discard"),
        ({"why": "w", "until": ""}, "isn't the dry run"),
        ({"why": "w", "until": "2999-01-01"}, "isn't the dry run"),
        ({"why": "w", "topic": "*"}, "isn't the dry run"),
        ({"why": "w", "kind": "retry"}, "isn't the dry run"),
        ({"why": "w", "expected": "many"}, "isn't the dry run"),
        ({"why": "w", "signature": "é"}, "isn't the dry run"),
    ],
)
def test_an_incomplete_request_is_refused(
    database_url: str, fields: dict[str, str], said: str
) -> None:
    give_up(database_url, Message("a", 1))
    with browsing(database_url) as browser:
        plan(browser, "discard")
        assert said in shown(browser.post("/operations/ask", **fields))
    assert browser.status == 400
    assert execute(database_url, "SELECT * FROM outbox.operation") == []


def test_an_operation_fails_with_the_reason_if_the_broker_is_unreachable(
    database_url: str,
) -> None:
    give_up(database_url, Message("a", 1))
    away = retries(database_url, broker="redis://127.0.0.1:1")
    with browsing(database_url, retry=away) as browser:
        plan(browser, "retry", side="outbox")
        browser.post("/operations/ask")
        browser.wait_until_shown(address(database_url), "</strong>: failed")
        assert "127.0.0.1:1" in browser.text
    assert states(database_url) == [("PENDING", 0, "refused")]


def test_a_missing_operation_is_not_found(database_url: str) -> None:
    with browsing(database_url) as browser:
        for id in ("", "7", "0" * 32):
            browser.get(f"/operation?id={id}")
            assert browser.status == 404


def test_an_operation_leaves_alone_what_was_dead_lettered_after_it_was_asked_for(
    database_url: str,
) -> None:
    give_up(database_url, Message("before", 1))
    execute(
        database_url,
        "INSERT INTO outbox.operation (kind, selection, reason, asked_by, expected,"
        " asked_at, starts_at) VALUES ('discard',"
        ' \'{"since": "2000-01-01", "until": "2999-01-01"}\', \'w\', \'ann\', 1,'
        " clock_timestamp(), now())",
    )
    give_up(database_url, Message("after", 1))
    with browsing(database_url) as browser:
        browser.wait_until_shown(address(database_url), "</strong>: done")
    found = execute(database_url, "SELECT topic, status FROM outbox.dead_letter")
    assert dict(found) == {"before": "DISCARDED", "after": "PENDING"}


def test_an_operation_with_an_invalid_selection_does_not_empty_the_list(
    database_url: str,
) -> None:
    for window in ("7d", "a fortnight"):
        execute(
            database_url,
            "INSERT INTO outbox.operation (kind, selection, reason, asked_by, expected,"
            " starts_at) VALUES ('retry', jsonb_build_object('window', %s::text), 'w',"
            " 'ann', 1, now() + interval '1 h')",
            [window],
        )
    with pytest.raises(psycopg.errors.CheckViolation, match="selection_of_strings"):
        execute(
            database_url,
            "INSERT INTO outbox.operation (kind, selection, reason, asked_by, expected)"
            " VALUES ('retry', '[]', 'w', 'ann', 1)",
        )
    with browsing(database_url) as browser:
        text = shown(browser.get("/operations"))
    assert "an invalid selection: window 'a fortnight'" in text
    assert text.count("ann retry") == 2
