"""The pages of several databases: one login, and lives that go through all of them."""

import urllib.request
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from pillarbox import Message
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.message_id import uuid7
from pillarbox.outbox.web import Settings, TokenLogin, web_app
from pillarbox.outbox.web.frame import name_in
from tests.fixtures.dead_letters import give_up
from tests.fixtures.family import handle
from tests.fixtures.positions import publish
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute
from tests.fixtures.web import ANN, TOKENS, Browser, as_role, browsing, served


def name_of(url: str) -> str:
    return url.rpartition("/")[2]


def test_each_database_has_its_pages_after_one_login(
    database_url: str, other_url: str
) -> None:
    give_up(other_url, Message("received", b""), schema="inbox")
    there = f"/of/{name_of(other_url)}"
    with browsing(database_url, others=(other_url,)) as browser:
        assert "received" not in browser.get("/dead-letters")
        assert f'href="{there}/"' in browser.text
        assert "received" in browser.get(f"{there}/dead-letters")
        assert f'<a href="/">{name_of(database_url)}</a>' in browser.text
        assert f'href="{there}/" aria-current="page"' in browser.text
        browser.post_raw(f"{there}/logout", {})
        browser.get("/dead-letters")
        assert 'name="token"' in browser.text


def test_a_login_at_the_page_of_one_is_one_at_all(
    database_url: str, other_url: str
) -> None:
    there = f"/of/{name_of(other_url)}"
    with browsing(database_url, token=None, others=(other_url,)) as browser:
        browser.get(f"{there}/dead-letters")
        browser.post(f"{there}/login", token=ANN)
        assert "Dead letters" in browser.get("/dead-letters")
        assert browser.status == 200


def test_a_message_is_shown_with_its_life_in_all_and_its_payload_where_it_is(
    database_url: str, other_url: str
) -> None:
    placed = Message("orders.placed", b"the order")
    cause = {"causation-id": str(placed.id)}
    issued = Message("invoices.issued", b"the invoice", headers=cause)
    insert(database_url, placed)
    publish(database_url)
    handle(other_url, placed, "invoicing")
    insert(other_url, issued)
    with browsing(database_url, others=(other_url,)) as browser:
        for base in ("", f"/of/{name_of(other_url)}"):
            shown = browser.get(f"{base}/message?id={placed.id}")
            assert "the order" in shown
            assert f"In {name_of(other_url)}." in shown
            assert str(issued.id) in shown
            assert "add its database" not in shown
            assert "the invoice" in browser.get(f"{base}/message?id={issued.id}")


def test_an_error_names_the_database_in_which_it_happened(
    database_url: str, other_url: str
) -> None:
    here, there = (as_role(it, "pillarbox_web") for it in (database_url, other_url))
    with browsing(here, others=(there,)) as browser:
        for url, base in ((database_url, "/of/" + name_of(other_url)), (other_url, "")):
            execute(url, "REVOKE USAGE ON SCHEMA outbox FROM pillarbox_monitor")
            execute(url, "REVOKE USAGE ON SCHEMA outbox FROM pillarbox_web")
            shown = browser.get(f"{base}/message?id={uuid7()}")
            assert f"/{name_of(url)}: permission denied" in shown
            execute(url, "GRANT USAGE ON SCHEMA outbox TO pillarbox_web")


def test_a_message_is_shown_while_the_other_database_is_unreachable(
    database_url: str,
) -> None:
    placed = Message("orders.placed", b"the order")
    insert(database_url, placed)
    away = "postgresql://nobody@127.0.0.1:9/invoicing"
    with browsing(database_url, others=(away,)) as browser:
        shown = browser.get(f"/message?id={placed.id}")
        assert "the order" in shown
        assert f"database {away}" in shown
        assert browser.status == 200
        browser.get(f"/message?id={uuid7()}")
        assert browser.status == 404


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("postgresql+psycopg://me:secret@db:5432/shop?sslmode=require", "shop"),
        ("postgresql://db/the%20shop", "the shop"),
        ("postgresql:///?host=/run&dbname=shop", "shop"),
        ("postgresql://shop:secret@db", "shop"),
    ],
)
def test_a_database_has_the_name_to_which_libpq_connects(url: str, name: str) -> None:
    assert name_in(url) == name


def test_an_application_mounts_them_together(database_url: str, other_url: str) -> None:
    page = web_app(
        Settings(database=database_url, others=(other_url,)), TokenLogin(TOKENS)
    )
    with TestClient(Starlette(routes=[Mount("/ops", page)])) as client:
        browser = Browser(client)
        browser.get("/ops/login")
        browser.post("/ops/login", token=ANN)
        there = f"/ops/of/{name_of(other_url)}"
        browser.get(f"{there}/dead-letters")
        assert (browser.status, 'href="/ops/"' in browser.text) == (200, True)


def test_two_databases_of_one_name_are_refused() -> None:
    settings = Settings(database="postgresql://a/app", others=("postgresql://b/app",))
    with pytest.raises(ConfigError, match="two databases are called app"):
        web_app(settings, TokenLogin(TOKENS))


def test_the_command_takes_several(
    database_url: str, other_url: str, tmp_path: Path
) -> None:
    urls = f"{database_url} {other_url}"
    with served(urls, tmp_path / "log") as (_, address):
        login = f"{address}/of/{name_of(other_url)}/login"
        with urllib.request.urlopen(login, timeout=60) as page:
            assert page.status == 200
