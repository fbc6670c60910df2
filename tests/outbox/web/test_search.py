"""One search for an id, a key, a topic or a tenant; and the page of a consumer."""

from datetime import timedelta

import pytest

from pillarbox import Message
from pillarbox.outbox.message_id import uuid7
from tests.fixtures.dead_letters import give_up
from tests.fixtures.presence import record_process
from tests.fixtures.readers import add_consumer
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute
from tests.fixtures.web import BOB, browsing
from tests.outbox.web.test_dead_letters import HOSTILE, shown


def test_an_id_or_its_beginning_leads_to_the_message_or_the_dead_letter(
    database_url: str,
) -> None:
    message = Message("orders", 1)
    insert(database_url, message)
    (letter,) = give_up(database_url, Message("mails", 1), schema="inbox")
    with browsing(database_url) as browser:
        for part in (str(message.id), str(message.id)[:13], message.id.hex[:20]):
            text = shown(browser.get(f"/search?q={part}"))
            assert (part, "Message" in text, "orders" in text) == (part, True, True)
            assert "Life" in text
        assert "Dead-lettered by" in browser.get(f"/search?q={str(letter)[:8]}")
        assert "Not found" in browser.get(f"/search?q={uuid7()}")
        assert browser.status == 404


@pytest.mark.parametrize("name", ["key", "topic", "tenant"])
def test_a_key_a_topic_or_a_tenant_leads_to_its_messages_and_dead_letters(
    database_url: str, name: str
) -> None:
    key = "4cf7d3b2-8f0c-4d8b-9a57-2d5c3f9b1e60"
    values = {"topic": "orders", "key": key, "tenant": "acme c"}
    message = Message(values["topic"], 1, key=values["key"], tenant=values["tenant"])
    insert(database_url, message)
    with browsing(database_url) as browser:
        assert "1 message found" in shown(browser.get(f"/search?q={values[name]}"))
        give_up(database_url, message)
        text = browser.get(f"/search?q={values[name]}")
        assert f"{name}: 1 messages" in text
        assert f"{name}: 1 dead letters" in text
        browser.get(f"/search?q={HOSTILE}")
        assert "<img" not in browser.text
        assert "No matches." in browser.text


def test_an_address_that_names_no_message_says_what_is_wrong(database_url: str) -> None:
    with browsing(database_url) as browser:
        assert "not a UUID" in browser.get("/messages/zzz")
        assert browser.status == 400
        assert "There is no page /nowhere" in browser.get("/nowhere")
        message = Message("orders", 1)
        insert(database_url, message)
        assert "Life" in browser.get(f"/messages/{message.id}")


def test_a_consumer_has_a_page_with_replicas_failures_and_pauses(
    database_url: str,
) -> None:
    add_consumer(database_url, "billing", "orders")
    add_consumer(database_url, "billing--slow", "mails")
    record_process(database_url, "consumer", "billing", host=HOSTILE, blocked_keys=3)
    give_up(
        database_url,
        Message("orders", 1),
        schema="inbox",
        reason="no such customer",
        origin="consumer:billing",
    )
    execute(database_url, "SELECT outbox.pause('billing', 'orders', 'bank', 'ann')")
    with browsing(database_url) as browser:
        for name in ("billing", "billing--slow"):
            text = shown(browser.get(f"/consumer?name={name}"))
            assert "<img" not in browser.text
            for part in (
                "Blocked keys 3 in its processes",
                "1: no such customer",
                "topic orders of consumer billing, by ann",
            ):
                assert part in text
            form = browser.text.partition('action="/pause"')[2]
            assert 'value="billing"' in form
        assert "No consumer nobody runs" in browser.get("/consumer?name=nobody")
        assert browser.status == 404
    with browsing(database_url, token=BOB) as browser:
        assert 'action="/pause"' not in browser.get("/consumer?name=billing")


def test_a_warning_links_to_the_list_of_what_it_is_about(database_url: str) -> None:
    give_up(database_url, Message("a", 1))
    add_consumer(database_url, "bill ing", "orders")
    with browsing(database_url) as browser:
        assert 'href="/dead-letters?side=outbox">Show</a>' in browser.get("/")


def test_times_are_local_in_the_browser_and_in_utc_on_hover(database_url: str) -> None:
    (letter,) = give_up(database_url, Message("a", 1), age=timedelta(days=1))
    with browsing(database_url) as browser:
        text = browser.get(f"/dead-letters/outbox/{letter}")
        ((at,),) = execute(
            database_url,
            "SELECT to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS')"
            " FROM outbox.dead_letter",
        )
        assert f'title="{at} UTC">{at} UTC</time>' in text
