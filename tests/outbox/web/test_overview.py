"""The first page: whether all is well, the diagram, and the last hour."""

from contextlib import ExitStack
from datetime import timedelta

from outbox import Message
from outbox.lane import LANES
from outbox.postgres.advisory_lock import LOCK_CLASS, consumer_class
from tests.fixtures.dead_letters import give_up
from tests.fixtures.marks import defer, publish
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute
from tests.fixtures.web import as_role, browsing
from tests.outbox.web.test_dead_letters import HOSTILE, shown
from tests.outbox.web.test_sections import session

SUBSCRIBE = "INSERT INTO inbox.subscription (consumer, topic) VALUES (%s, 'a')"
ALL_LANES = range(LANES)


def overview(url: str) -> str:
    with browsing(url) as browser:
        return browser.get("/")


def test_the_first_page_says_that_all_is_well(database_url: str) -> None:
    execute(database_url, "CALL outbox.maintain()")
    with session(database_url, "pillarbox relay host 7 lease", LOCK_CLASS, ALL_LANES):
        text = overview(database_url)
    assert "<strong>All well</strong>" in text
    assert "48 of 48 held by relays" in shown(text)
    assert text.count("held-lane") == LANES


def test_problems_come_first_with_their_remedies(database_url: str) -> None:
    give_up(database_url, Message("a", 1), reason="refused")
    execute(database_url, "SELECT outbox.note_failure('no space')")
    text = shown(overview(database_url))
    assert "All well" not in text
    assert "the upkeep fails: no space" in text
    assert "1 pending dead letter of the outbox" in text
    assert "pillarbox dead-letters list --side outbox" in text


def test_the_diagram_shows_relays_lanes_and_consumers(database_url: str) -> None:
    for name in ("billing", "mail"):
        execute(database_url, SUBSCRIBE, [name])
    insert(database_url, *(Message("a", 1, key=f"k{n}") for n in range(3)))
    with ExitStack() as stack:
        for name, number, lanes in (
            ("relay host 7", LOCK_CLASS, range(16, 40)),
            ("inbox billing", consumer_class("billing"), range(16)),
        ):
            stack.enter_context(
                session(database_url, f"pillarbox {name} lease", number, lanes)
            )
        text = overview(database_url)
    picture = text[text.index("<svg") : text.index("</svg>")]
    assert (picture.count("held-lane"), picture.count("free-lane")) == (24, 24)
    assert "host 7" in picture
    assert "24 lanes" in picture
    assert "3 wait" in picture
    # Only the box of mail, which isn't connected.
    assert picture.count('bad-box"><rect x="900"') == 1
    table = shown(text[text.index('id="flow-table"') :])
    assert "Consumer mail is not connected" in table
    assert "Consumer billing is not connected" not in table


def test_the_last_hour_is_shown_as_charts_and_text(database_url: str) -> None:
    insert(database_url, *(Message("a", 1) for _ in range(3)))
    publish(database_url)
    give_up(database_url, Message("a", 1), age=timedelta(minutes=20))
    text = overview(database_url)
    assert text.count('<polyline points="0,') == 4
    said = shown(text)
    assert "Dead letters of the outbox" in said
    assert "1 in the last hour, at most 1 a minute" in said


def test_refused_messages_are_linked_and_listed_with_their_reason(
    database_url: str,
) -> None:
    insert(database_url, Message("orders", 1, key=HOSTILE), Message("orders", 2))
    defer(database_url, "refused", attempts=2, reason=HOSTILE)
    with browsing(database_url) as browser:
        text = browser.get("/")
        assert "1 blocked key</a>, 1 message without a key" in text
        text = browser.get("/blocked")
        assert "<img" not in text
        assert "1 blocked key, and 1 message without a key, now" in shown(text)
        assert text.count("<td>orders</td>") == 2
        (link,) = (it for it in text.split('"') if "status=ANY" in it)
        browser.get(link.replace("&amp;", "&"))
        assert browser.status == 200


def test_names_in_the_diagram_are_escaped(database_url: str) -> None:
    execute(database_url, SUBSCRIBE, [HOSTILE])
    with session(database_url, f"pillarbox relay {HOSTILE}", LOCK_CLASS, range(1)):
        text = overview(database_url)
    assert "<img" not in text


def test_parts_that_the_role_cannot_read_are_named(database_url: str) -> None:
    text = shown(overview(as_role(database_url, "pillarbox_relay")))
    assert "lacks privileges" in text
    assert "The last hour can't be shown" in text


def test_more_processes_than_fit_become_one_box(database_url: str) -> None:
    with ExitStack() as stack:
        for n in range(8):
            name = f"pillarbox relay host {n} lease"
            stack.enter_context(session(database_url, name, LOCK_CLASS, range(n, n)))
        text = overview(database_url)
    assert "and 3 more" in text
    assert "8 connected" in shown(text)
