"""Dead letters on the page: groups, filters, and the contents of one."""

import html
import re
import tracemalloc
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pillarbox import Message
from pillarbox.outbox.dead_letters.statement import Schema
from pillarbox.outbox.lane import Priority
from pillarbox.outbox.web.dead_letters import own_frame, show
from pillarbox.outbox.web.selection import Selection
from tests.fixtures.dead_letters import give_up
from tests.fixtures.web import BOB, as_role, browsing

HOSTILE = "<script>alert('1')</script>\"><img src=x onerror=y>{{ 7*7 }}"
PAYLOAD = {"card": "4111", "name": "Jane <b>"}


def shown(text: str) -> str:
    """Return the text of a page without its tags."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


def test_dead_letters_of_both_sides_are_grouped_by_reason_with_counts_and_links(
    database_url: str,
) -> None:
    for n in range(3):
        give_up(database_url, Message(f"t{n}", 1), reason="the broker refused it")
    give_up(database_url, Message("t", 1), schema="inbox", reason="no & customer")
    with browsing(database_url) as browser:
        linked = browser.get("/dead-letters")
        (link,) = re.findall(r'href="([^"]*)"[^>]*>no &amp; customer<', linked)
        listed = shown(browser.get(html.unescape(link)))
    assert "1 PENDING; side inbox, origin" in listed
    assert "refused" not in listed
    text = shown(linked)
    assert "4 PENDING; no filter." in text
    assert "3 the broker refused it relay:main outbox t0 and 2 more" in text
    assert "1 no & customer consumer:billing inbox t" in text


def test_filters_are_combined(database_url: str) -> None:
    made: dict[str, tuple[Schema, Message, dict[str, Any]]] = {
        "a": ("outbox", Message("orders.placed", 1, key="k1", tenant="acme"), {}),
        "b": (
            "outbox",
            Message("orders.paid", 1, key="k2", tenant="acme"),
            {"reason": "a timeout"},
        ),
        "c": (
            "inbox",
            Message("mails", 1),
            {"origin": "consumer:mail", "age": timedelta(hours=2)},
        ),
        "e": ("inbox", Message("orders.placed", 1), {"reason": "a timeout"}),
    }
    ids = {
        str(give_up(database_url, message, schema=side, **changes)[0]): name
        for name, (side, message, changes) in made.items()
    }
    since = f"since={datetime.now(UTC) - timedelta(hours=1):%Y-%m-%dT%H:%M}"
    expected = {
        "topic=orders.placed&tenant=acme": {"a"},
        "topic=orders.*": {"a", "b", "e"},
        "topic=orders.*&tenant=acme&key=k2": {"b"},
        "origin=consumer:mail": {"c"},
        "error=TIMEOUT&side=outbox": {"b"},
        since: {"a", "b", "e"},
        since.replace("since", "until"): {"c"},
        "side=inbox": {"c", "e"},
        "status=DISCARDED": set(),
        "status=ANY&tenant=acme": {"a", "b"},
    }
    with browsing(database_url) as browser:
        for query, found in expected.items():
            listed = re.findall(
                r"/dead-letters/\w+/([-\w]{36})", browser.get(f"/dead-letters?{query}")
            )
            assert (query, {ids[id] for id in listed}) == (query, found)
        text = shown(browser.get(f"/dead-letters?{since}"))
    assert f"3 PENDING; {since.replace('=', ' ')}" in text


def test_the_next_page_of_the_list_continues_where_the_last_one_ended(
    database_url: str,
) -> None:
    give_up(database_url, *[Message(f"t{n}", 1) for n in range(30)])
    give_up(database_url, *[Message(f"t{n}", 1) for n in range(30)], schema="inbox")
    seen: list[str] = []
    with browsing(database_url) as browser:
        text = browser.get("/dead-letters")
        seen += re.findall(r"/dead-letters/\w+/([-\w]{36})", text)
        (older,) = re.findall(r'href="([^"]*)">Older', text)
        text = browser.get(html.unescape(older))
        seen += re.findall(r"/dead-letters/\w+/([-\w]{36})", text)
    assert (len(seen), len(set(seen)), "Older" in text) == (60, 60, False)


def test_the_error_for_an_invalid_filter_names_it(database_url: str) -> None:
    long = f"topic={'x' * 3000}"
    with browsing(database_url) as browser:
        for query in (
            *("status=GONE", "side=relay", "since=yesterday", "id=7", "topic=%00"),
            *("before=x", long),
        ):
            text = browser.get(f"/dead-letters?{query}")
            assert (query, browser.status) == (query, 400)
            assert query.partition("=")[0] in shown(text)


def test_hostile_values_in_rows_are_escaped(database_url: str) -> None:
    (id,) = give_up(
        database_url,
        Message(
            "t", {"x": HOSTILE}, key=HOSTILE, tenant=HOSTILE, headers={"h": HOSTILE}
        ),
        reason=HOSTILE,
        origin=HOSTILE,
        topic=HOSTILE,
        stacktrace=HOSTILE,
    )
    with browsing(database_url) as browser:
        pages = [
            browser.get("/dead-letters"),
            browser.get(f"/dead-letters/outbox/{id}"),
            browser.post("/dead-letters/plan", kind="discard"),
        ]
        assert browser.status == 200
    for text in pages:
        assert "&lt;script&gt;" in text
        assert "<img" not in text
        assert text.count("<script") == 1
        assert "{{ 7*7 }}" in text


def test_one_dead_letter_is_shown_with_its_contents(database_url: str) -> None:
    (id,) = give_up(
        database_url,
        Message("t", PAYLOAD, key="k", headers={"h": "v"}, priority=Priority.BULK),
        schema="inbox",
        stacktrace="Traceback: line 7",
    )
    lone = Message("t", rb'{"name": "\ud800"}', content_type="application/json")
    (surrogate,) = give_up(database_url, lone)
    with browsing(database_url) as browser:
        text = shown(browser.get(f"/dead-letters/inbox/{id}"))
        expected = "Traceback: line 7", "consumer:billing", "h v", "Priority bulk"
        for each in ('"card": "4111"', *expected):
            assert each in text
        text = shown(browser.get(f"/dead-letters/outbox/{surrogate}"))
        assert (browser.status, r'"name": "\ud800"' in text) == (200, True)
        for missing in ("outbox", "relay"):
            browser.get(f"/dead-letters/{missing}/{'0' * 32}")
            assert (missing, browser.status) == (missing, 404)


def test_the_hook_redacts_payload_headers_and_stack_trace(database_url: str) -> None:
    (id,) = give_up(
        database_url,
        Message("t", PAYLOAD, headers={"h": "4111"}),
        stacktrace="card 4111 refused",
    )

    def redact(text: str) -> str:
        return text.replace("4111", "****")

    with browsing(database_url, redact=redact) as browser:
        text = shown(browser.get(f"/dead-letters/outbox/{id}"))
    assert "4111" not in text
    assert text.count("****") == 3


def test_contents_are_hidden_from_viewers_and_roles_and_if_the_hook_fails(
    database_url: str,
) -> None:
    (id,) = give_up(
        database_url,
        Message("t", PAYLOAD, headers={"h": "s3cret"}),
        stacktrace="line 7",
    )

    def fail(text: str) -> str:
        raise ValueError(text)

    of_the_page = as_role(database_url, "pillarbox_web")
    for opened, why in (
        (browsing(database_url, token=BOB), "bob may not see them"),
        (browsing(of_the_page), "GRANT SELECT ON outbox.dead_letter"),
        (browsing(database_url, redact=fail), "the redact hook raised ValueError"),
    ):
        with opened as browser:
            text = shown(browser.get(f"/dead-letters/outbox/{id}"))
        assert why in text
        seen = [it for it in ("4111", "s3cret", "line 7") if it in text]
        assert (why, seen) == (why, [])


def test_a_frozen_selection_matches_no_later_dead_letters() -> None:
    selection = Selection.of({"topic": "t", "since": "2026-01-31T14:00"})
    at = datetime.now(UTC)
    frozen = selection.frozen(at)
    assert frozen.criteria().since == datetime(2026, 1, 31, 14, tzinfo=UTC)
    assert frozen.criteria().until == at
    assert frozen.frozen(at + timedelta(days=30)) == frozen
    assert Selection.of(frozen.fields()) == frozen


def test_a_deep_payload_of_1_mb_is_shown_at_the_cost_of_its_beginning() -> None:
    payload = b"[" * 99 + b"1," * 450_000 + b"1" + b"]" * 99
    tracemalloc.start()
    try:
        contents = show("application/json", {}, payload, None, str)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert contents.payload.startswith("[[[")
    assert contents.payload_bytes == len(payload)
    assert peak < 16 * len(payload)


TRACE = """\
Traceback (most recent call last):
  File "/lib/python3.12/site-packages/pillarbox/inbox/attempt.py", line 9, in run
    call(message)
  File "/app/billing/handlers.py", line 41, in charge
    customer = find(order)
               ^^^^^^^^^^^
  File "/app/billing/customers.py", line 7, in find
    return client.get(order)
  File "/usr/lib/python3.12/http/client.py", line 3, in get
    raise LookupError(order)
LookupError: no such customer
"""


@pytest.mark.parametrize(
    ("trace", "frame"),
    [
        (
            TRACE,
            '  File "/app/billing/customers.py", line 7, in find\n'
            "    return client.get(order)\nLookupError: no such customer",
        ),
        ("no trace at all", ""),
        (TRACE.replace("/app/billing", "/usr/lib/python3.12"), ""),
    ],
)
def test_the_frame_of_the_application_comes_first(trace: str, frame: str) -> None:
    assert own_frame(trace) == frame


def test_the_rest_of_a_stack_trace_is_folded(database_url: str) -> None:
    (letter,) = give_up(database_url, Message("a", 1), stacktrace=TRACE)
    with browsing(database_url) as browser:
        text = browser.get(f"/dead-letters/outbox/{letter}")
    first, _, folded = text.partition("<details>")
    assert "customers.py" in first
    assert "client.py" not in first
    assert "client.py" in folded
    assert 'data-copy="trace"' in first
