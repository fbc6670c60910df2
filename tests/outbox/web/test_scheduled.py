"""Scheduled messages on the page: list, cancel and move them."""

from datetime import UTC, datetime, timedelta

from pillarbox import Message
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute
from tests.fixtures.web import BOB, as_role, browsing
from tests.outbox.web.test_dead_letters import HOSTILE, shown

DUE = datetime.now(UTC) + timedelta(hours=3)
STATES = "SELECT id, state, available_at FROM outbox.message_status ORDER BY seq"


def test_scheduled_messages_are_listed_and_filtered(database_url: str) -> None:
    with browsing(database_url) as browser:
        assert "No scheduled messages." in shown(browser.get("/scheduled"))
        insert(
            database_url,
            Message("reminders", b"", key=HOSTILE, available_at=DUE),
            Message("other", b"", tenant="acme", available_at=DUE),
        )
        text = browser.get("/scheduled")
        assert "<img" not in text
        assert "2 messages that are not due" in shown(text)
        text = shown(browser.get("/scheduled?topic=rem*"))
        assert "reminders" in text
        assert "other" not in text
        text = shown(browser.get("/scheduled?tenant=none"))
        assert "No scheduled messages match." in text


def test_a_message_is_cancelled_and_who_asked_is_recorded(database_url: str) -> None:
    message = Message("t", b"", available_at=DUE)
    insert(database_url, message)
    id = str(message.id)
    with browsing(database_url, token=BOB) as browser:
        assert "/scheduled/cancel" not in browser.get("/scheduled"), "read-only access"
    with browsing(as_role(database_url, "pillarbox_web")) as browser:
        browser.get("/scheduled")
        browser.post("/scheduled/move", id=id, why="", to="2999-01-01T00:00")
        assert browser.status == 400
        assert "more than 6 days ahead; nothing was changed" in shown(browser.text)
        browser.get("/scheduled")
        browser.post("/scheduled/cancel", id=id, why="withdrawn")
        assert browser.status == 200
        browser.get("/scheduled")
        browser.post("/scheduled/move", id=id, why="", to=f"{DUE:%Y-%m-%dT%H:%M}")
        assert browser.status == 400
        assert "was already cancelled: nothing was changed" in shown(browser.text)
        browser.get("/scheduled")
        browser.post("/scheduled/cancel", id="7")
        assert browser.status == 400
        text = shown(browser.get(f"/message?id={id}"))
        assert "by ann: withdrawn" in text
    query = "SELECT reason FROM outbox.deferral"
    assert execute(database_url, query) == [("by ann: withdrawn",)]


def test_a_message_is_moved_to_a_time_in_utc(database_url: str) -> None:
    message = Message("t", b"", available_at=DUE)
    insert(database_url, message)
    id, to = str(message.id), (DUE + timedelta(days=1)).replace(second=0, microsecond=0)
    with browsing(as_role(database_url, "pillarbox_web")) as browser:
        for wrong in ("", "tomorrow", "2020-01-01T00:00"):
            browser.get("/scheduled")
            browser.post("/scheduled/move", id=id, why="", to=wrong)
            assert (wrong, browser.status) == (wrong, 400)
        browser.get("/scheduled")
        browser.post("/scheduled/move", id=id, why="", to=f"{to:%Y-%m-%dT%H:%M}")
        assert browser.status == 200
        browser.get("/scheduled")
        browser.post("/scheduled/cancel", id=id, why="")
        assert browser.status == 200, "it was cancelled before"
    (first, second) = execute(database_url, STATES)
    assert first[:2] == (message.id, "cancelled")
    assert second[1:] == ("scheduled", to)
