"""The first page: what needs attention, the flow, and who runs."""

import re
from datetime import timedelta

import psycopg

from pillarbox import Message
from pillarbox.outbox.postgres.advisory_lock import LOCK_CLASS, Lock
from tests.fixtures.dead_letters import give_up
from tests.fixtures.positions import defer
from tests.fixtures.presence import record_process
from tests.fixtures.readers import add_consumer
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute
from tests.fixtures.web import BOB, as_role, browsing
from tests.outbox.web.test_dead_letters import HOSTILE, shown


def overview(url: str) -> str:
    with browsing(url) as browser:
        return browser.get("/")


def test_the_first_page_says_that_all_is_well(database_url: str) -> None:
    execute(database_url, "CALL outbox.maintain()")
    record_process(database_url, "relay", host=HOSTILE, broker=HOSTILE)
    text = overview(database_url)
    assert "<strong>All well</strong>" in text
    assert "Needs attention" not in text
    assert "<img" not in text


def test_problems_come_first_with_their_remedies(database_url: str) -> None:
    give_up(database_url, Message("a", 1), reason="refused")
    execute(database_url, "SELECT outbox.note_failure('no space')")
    text = shown(overview(database_url))
    assert "All well" not in text
    assert "no space" in text
    assert "1 pending dead letter in the outbox" in text
    assert "pillarbox dead-letters list --side outbox" in text
    assert "no relay is running" in text
    assert "No processes are running." in text
    text = shown(overview(as_role(database_url, "pillarbox_relay")))
    assert "lacks privileges" in text, "of a role that can't read every part"


def test_relays_and_consumers_are_shown_with_what_they_fail_at(
    database_url: str,
) -> None:
    for name in ("billing", "mail"):
        add_consumer(database_url, name, "a")
    insert(database_url, *(Message("a", 1, key=f"k{n}") for n in range(3)))
    record_process(database_url, "relay")
    record_process(database_url, "relay", host="gone 1", silent=timedelta(minutes=2))
    record_process(database_url, "consumer", "billing", broker="postgresql://db/shop")
    record_process(database_url, "consumer", "orders", standing_by="a, b")
    record_process(
        database_url,
        "consumer",
        "reports",
        failing=timedelta(minutes=3),
        reason="KeyError: no",
        blocked_keys=4,
    )
    text = shown(overview(database_url))
    assert "Outbox 3 wait" in text
    assert "Relays 1 running" in text
    assert "gone 1" not in text
    assert re.search(r"billing 1 3 wait", text)
    assert "mail not running" in text
    assert "redis://broker/0 stands by for a, b" in text
    assert re.search(r"reports on host 7 has been failing for 3m: KeyError: no", text)
    assert "if the reason names a message, run pillarbox trace" in text
    assert re.search(r"reports host 7 \S+ ago redis://broker/0 0 4 since 3m", text)


def test_refused_messages_are_linked_and_listed_with_their_reason(
    database_url: str,
) -> None:
    add_consumer(database_url, HOSTILE, "a")
    record_process(database_url, "relay", host=HOSTILE, reason=HOSTILE)
    insert(database_url, Message("orders", 1, key=HOSTILE), Message("orders", 2))
    defer(database_url, "refused", attempts=2, reason=HOSTILE)
    with browsing(database_url) as browser:
        text = browser.get("/")
        assert "1 blocked key, 1 refused message without a key</a>" in text
        assert "<img" not in text
        text = browser.get("/blocked")
        assert "<img" not in text
        assert "1 blocked key, 1 refused message without a key" in shown(text)
        assert text.count('<td class="name">orders</td>') == 2
        (link,) = (it for it in text.split('"') if "status=ANY" in it)
        browser.get(link.replace("&amp;", "&"))
        assert browser.status == 200


def test_who_may_pause_pauses_and_resumes_with_a_reason(database_url: str) -> None:
    paused = "SELECT outbox.paused_topics('billing')"
    with browsing(database_url) as browser:
        browser.get("/")
        browser.post("/pause", consumer="billing", topic="a.*", why="")
        assert browser.status == 400
        assert "state why" in browser.text
        text = browser.post("/pause", consumer="billing ", topic=" a.*", why=HOSTILE)
        assert execute(database_url, paused) == [(["a.*"],)]
        assert "<img" not in text
        assert "topic a.* of consumer billing, by ann" in shown(text)
        assert "in force" in browser.get("/operations")
        browser.get("/")
        browser.post("/resume")
        assert execute(database_url, paused) == [([],)]
        assert "Paused:" not in browser.text
    with browsing(database_url, token=BOB) as browser:
        assert "/pause" not in browser.get("/")


def test_a_pause_doesnt_make_a_running_operation_look_lost(database_url: str) -> None:
    execute(
        database_url,
        "INSERT INTO outbox.operation (kind, selection, reason, asked_by, expected)"
        " VALUES ('retry', '{}', 'r', 'ann', 1)",
    )
    execute(database_url, "SELECT outbox.pause('b', NULL, 'r', 'ann')")
    lock = "SELECT pg_advisory_lock(%s, %s)"
    with psycopg.connect(database_url) as connection:
        connection.execute(lock, (LOCK_CLASS, int(Lock.OPERATION)))
        with browsing(database_url) as browser:
            assert "has ended" not in browser.get("/operations")
