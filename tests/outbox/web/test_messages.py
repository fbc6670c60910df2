"""Messages on the page: search, the life of a message, and who sees its payload."""

import pytest

from pillarbox import Message
from tests.fixtures.family import insert_family
from tests.fixtures.web import BOB, as_role, browsing
from tests.outbox.web.test_dead_letters import HOSTILE, shown

SECRET = {"card": "4111"}


@pytest.fixture
def family(database_url: str) -> list[Message]:
    return insert_family(database_url, SECRET, HOSTILE)


def found(text: str, family: list[Message]) -> list[int]:
    """Return the indexes of the messages that a list contains."""
    return [n for n, message in enumerate(family) if f"m-{message.id}" in text]


FOUND = {
    "": [0, 1, 2],
    "?topic=orders.placed": [0],
    "?topic=orders.*": [0],
    "?tenant=acme": [0, 1],
    "?tenant=acme&topic=payments.*": [1],
    "?key=customer+7": [0],
    "?key=customer+7&state=unsettled": [],
    "?state=published": [0, 2],
    "?state=waiting": [1],
    "?state=unsettled": [1],
    "?state=unsettled&tenant=other": [],
    "?state=dead_lettered&window=7d": [],
}


def test_messages_are_found_by_topic_key_tenant_and_state(
    database_url: str, family: list[Message]
) -> None:
    with browsing(as_role(database_url, "pillarbox_web")) as browser:
        for query, expected in FOUND.items():
            text = browser.get(f"/messages{query}")
            assert (query, found(text, family)) == (query, expected)
            window = "the last 7 days" if "7d" in query else "the last hour"
            assert window in shown(text), query


def test_a_message_that_no_table_has_is_not_found(database_url: str) -> None:
    with browsing(as_role(database_url, "pillarbox_monitor")) as browser:
        nowhere = shown(browser.get(f"/message?id={Message('t', b'').id}"))
        assert (browser.status, "Not found" in nowhere) == (404, True)
        foreign = browser.get("/message?id=order-17")
        assert "inbox.foreign_receipt" in shown(foreign)
        gone = browser.get("/message?id=01600000-0000-7000-8000-000000000000")
        assert "outbox.message begins" in shown(gone)


def test_a_message_is_shown_with_its_life_and_its_effects(
    database_url: str, family: list[Message]
) -> None:
    with browsing(as_role(database_url, "pillarbox_monitor")) as browser:
        text = browser.get(f"/message?id={family[0].id}")
        child = browser.get(f"/message?id={family[1].id}")
    said = shown(text)
    assert "Consumer billing handled" in said
    for step in ("added", "published", "handled"):
        assert step in said
    for message in family:
        assert f'href="/message?id={message.id}"' in text
    assert "<img" not in text + child
    assert "waiting: refused 2 times" in shown(child)
    assert f'href="/message?id={family[0].id}"' in child


def test_the_payload_is_redacted_or_hidden_from_viewers_and_roles(
    database_url: str, family: list[Message]
) -> None:
    def redact(text: str) -> str:
        return text.replace("4111", "####")

    of_the_page = as_role(database_url, "pillarbox_web")
    for opened, said in (
        (browsing(database_url, token=BOB), "bob may not see them"),
        (browsing(of_the_page), "GRANT SELECT ON outbox.message TO it"),
        (browsing(database_url, redact=redact), '"card": "####"'),
    ):
        with opened as browser:
            text = shown(browser.get(f"/message?id={family[0].id}"))
        assert said in text
        assert "4111" not in text, said


def test_an_invalid_query_is_refused(database_url: str) -> None:
    with browsing(database_url) as browser:
        for query in (
            *("messages?state=lost", "messages?window=1y", "messages?key=%00"),
            *("messages?topic=%00", "message?id=%00", "message?id="),
        ):
            browser.get(f"/{query}")
            assert (query, browser.status) == (query, 400)
