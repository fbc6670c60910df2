"""The page in headless Chromium: keyboard, themes, a phone, live updates, axe."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from pillarbox import Message
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.chromium import browser
from tests.fixtures.dead_letters import give_up, states
from tests.fixtures.positions import defer
from tests.fixtures.postgres import Template, new_database
from tests.fixtures.presence import record_process
from tests.fixtures.processes import RunningProcess
from tests.fixtures.readers import add_consumer
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute
from tests.fixtures.web import served
from tests.outbox.web.test_sections import JOB

__all__ = ["browser"]

TOKEN = "a-token-for-the-browser"
PAGES = (
    "/overview",
    "/dead-letters",
    "/messages",
    "/scheduled",
    "/consumer?name=billing",
    "/search?q=orders.placed",
    "/search?q=nothing-has-this",
    "/blocked",
    "/jobs",
    "/partitions",
    "/operations",
)
LONG = "a very long reason that has no end " * 6
# Much longer than a page takes, because the machine can be busy.
PATIENCE = 60_000
RULES = {
    "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"],
    "resultTypes": ["violations"],
}
# The rules that depend on the theme.
COLORS = RULES | {"runOnly": ["color-contrast", "link-in-text-block"]}
SCHEMES: Final[dict[Literal["light", "dark"], Any]] = {"light": RULES, "dark": COLORS}
AXE: Final = Axe()
expect.set_options(timeout=PATIENCE)


class OpenPage(NamedTuple):
    """A page that a logged-in viewer has open in the browser."""

    page: Page
    address: str
    process: RunningProcess
    said: list[str]
    """Messages on the console of the browser."""


def seed(database_url: str) -> None:
    give_up(
        database_url,
        *[
            Message(f"orders.{n}", {"n": n}, key=f"k{n}", tenant="acme")
            for n in range(5)
        ],
        reason=LONG,
        stacktrace="Traceback (most recent call last):\n  line 7",
    )
    give_up(database_url, Message("mails", 1), schema="inbox", reason="no address")
    execute(database_url, JOB, ["reports", "reports.asked", timedelta(hours=1)])
    cause = Message("orders.placed", {"n": 1}, key="customer 7")
    effect = {"causation-id": str(cause.id)}
    insert(database_url, cause, Message("mails.asked", {}, headers=effect))
    insert(database_url, Message("orders", 1, key="refused"))
    defer(database_url, "refused", reason=LONG)
    for consumer in ("billing", "shipping_of_the_warehouse"):
        add_consumer(database_url, consumer, "a")
    record_process(database_url, "consumer", "billing", silent=-timedelta(hours=1))
    execute(database_url, "SELECT outbox.pause('billing', 'a', %s, 'ann')", [LONG])


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("tokens") / "tokens"
    file.write_text(f"ann {TOKEN} act pause payloads\n")
    return str(file)


Served: TypeAlias = tuple[RunningProcess, str]


@contextmanager
def serving(url: str, tokens: str, log: Path) -> Iterator[Served]:
    options = ("--tokens", tokens)
    with served(url, log, *options) as started:
        yield started


@pytest.fixture(scope="module")
def shared(
    server: PostgresServer,
    template: Template,
    tokens: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """Start the server for tests that change nothing."""
    with new_database(server, "pillarbox_test", template) as name:
        url = server.database_url(name)
        seed(url)
        with serving(url, tokens, tmp_path_factory.mktemp("web") / "log") as started:
            yield started


@pytest.fixture
def shared_page(shared: Served, browser: Browser) -> Iterator[OpenPage]:
    with open_page(shared, browser) as opened:
        yield opened


@contextmanager
def open_page(started: Served, browser: Browser) -> Iterator[OpenPage]:
    process, address = started
    with browser.new_context() as context:
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        said: list[str] = []
        page.on("console", lambda it: said.append(f"{it.type}: {it.text}"))
        page.on("pageerror", lambda it: said.append(str(it)))
        page.goto(f"{address}/login#{TOKEN}")
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
        yield OpenPage(page, address, process, said)


def violations(page: Page) -> list[Any]:
    """Check all rules in the light theme, and colors in the dark one."""
    found = []
    page.evaluate(AXE.axe_script)
    for scheme, rules in SCHEMES.items():
        page.emulate_media(color_scheme=scheme)
        found += page.evaluate(f"axe.run({json.dumps(rules)})")["violations"]
    return [(it["id"], [node["html"] for node in it["nodes"]]) for it in found]


def follow(page: Page, link: str, address: str) -> None:
    """Open the first such link; a click could meet an update of the page."""
    page.goto(f"{address}{page.locator(link).first.get_attribute('href')}")


# Whatever is wider than the place that it has: the page itself, a region that scrolls
# sideways, a cell, and a name that is broken inside a word.
CLIPPED = """() => {
  const places = "html, header, .scroll, main td, main p, main li";
  const found = [...document.querySelectorAll(places)].filter(
    (it) => it.scrollWidth > it.clientWidth + 1
      // On a phone, a cell ends in an ellipsis, and the page of its row has the rest.
      && getComputedStyle(it).textOverflow !== "ellipsis");
  const broken = [...document.querySelectorAll("td.name")].filter((it) => {
    const range = document.createRange();
    range.selectNodeContents(it);
    const tops = [...range.getClientRects()].map((box) => Math.round(box.top));
    return !/[\\s-]/.test(it.textContent.trim()) && new Set(tops).size > 1;
  });
  return [...found, ...broken].map(
    (it) => `${it.tagName}.${it.className} ${it.textContent.trim().slice(0, 60)}`);
}"""


def clipped(page: Page) -> dict[int, Any]:
    """Return what is clipped on screens of three widths."""
    found = {}
    for width in (390, 1024, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        found[width] = page.evaluate(CLIPPED)
    return {width: places for width, places in found.items() if places}


def test_no_page_violates_a_rule_of_axe_or_is_clipped(shared_page: OpenPage) -> None:
    page, address, _, said = shared_page
    page.emulate_media(reduced_motion="reduce")

    def check(path: str) -> None:
        assert (path, clipped(page), violations(page)) == (path, {}, [])

    for path in (*PAGES, "/messages?topic=orders.placed", "/dead-letters?status=ANY"):
        page.goto(f"{address}{path}")
        check(path)
    page.goto(f"{address}/messages?topic=orders.placed")
    follow(page, "#live a", address)
    expect(page.get_by_role("heading", name="Life")).to_be_visible()
    check("/message")
    page.goto(f"{address}/dead-letters")
    page.get_by_role("button", name="Discard all that match…").click()
    expect(page.get_by_label("Why")).to_be_focused()
    check("/dead-letters/plan of all")
    page.goto(f"{address}/dead-letters")
    follow(page, "a[id^='l-']", address)
    expect(page.get_by_role("heading", name="Payload")).to_be_visible()
    assert violations(page) == []
    page.get_by_role("button", name="Discard this one").click()
    expect(page.get_by_label("Why")).to_be_focused()
    assert violations(page) == []
    page.goto(f"{address}/nowhere")
    assert violations(page) == []
    # The page's own policy blocked nothing; one page does not exist.
    assert [it for it in said if it.startswith("error") and "404" not in it] == []


def test_a_message_is_found_and_its_tree_can_be_followed(shared_page: OpenPage) -> None:
    page, address, _, said = shared_page
    page.goto(f"{address}/messages")
    page.get_by_label("Key", exact=True).fill("customer 7")
    page.get_by_role("button", name="Find").click()
    page.locator("#live a").first.click()
    expect(page.get_by_role("table")).to_contain_text("added")
    expect(page.get_by_label("Payload")).to_contain_text('"n": 1')
    page.get_by_role("listitem").get_by_role("link").last.click()
    expect(page.locator("dl").first).to_contain_text("mails.asked")
    expect(
        page.get_by_role("listitem").filter(has_text="orders.placed")
    ).not_to_have_count(0)
    assert [it for it in said if it.startswith("error")] == []


def tab_to(page: Page, name: str) -> None:
    """Press Tab until the focus is on what has this id or text."""
    focused = "document.activeElement.id || document.activeElement.textContent.trim()"
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate(focused) == name:
            return
    raise AssertionError(f"{name} can't be reached")


def test_everything_can_be_reached_by_keyboard(shared_page: OpenPage) -> None:
    page, address, _, _ = shared_page
    page.goto(f"{address}/partitions")
    tab_to(page, "Dead letters")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Dead letters")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    tab_to(page, "g-1")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Reason", exact=True)).to_have_value(LONG[:80])


def test_the_theme_follows_the_system_and_the_navigation_is_one_line_on_a_laptop(
    shared_page: OpenPage,
) -> None:
    page = shared_page.page

    def background() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    page.emulate_media(color_scheme="light")
    light = background()
    page.emulate_media(color_scheme="dark")
    dark = background()
    assert light == "rgb(255, 255, 255)" != dark

    page.set_viewport_size({"width": 1280, "height": 800})
    tops = "[...document.querySelectorAll('header a')].map((it) => it.offsetTop)"
    assert len(set(page.evaluate(tops))) == 1
    assert page.evaluate("document.querySelector('header').offsetHeight") < 70


def test_a_page_is_not_read_while_its_tab_is_hidden(shared_page: OpenPage) -> None:
    page, address, _, _ = shared_page
    hide = """hidden => {
      Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.clock.install()
    page.goto(f"{address}/jobs")
    expect(page.locator("#status")).to_contain_text("Live")
    page.evaluate(hide, True)
    asked: list[str] = []
    page.on("request", lambda it: asked.append(it.url))
    page.clock.run_for(600_000)
    assert asked == []
    with page.expect_response(f"{address}/jobs"):
        page.evaluate(hide, False)


def test_an_open_page_acts_follows_the_database_and_asks_for_a_login_after_a_restart(
    database_url: str, tokens: str, tmp_path: Path, browser: Browser
) -> None:
    seed(database_url)
    with (
        serving(database_url, tokens, tmp_path / "log") as started,
        open_page(started, browser) as (page, address, process, _),
    ):
        page.goto(f"{address}/dead-letters?topic=orders.*")
        page.get_by_role("button", name="Discard all that match…").click()
        title = page.get_by_role("heading", level=1)
        expect(title).to_have_text("Discard 5 dead letters?")
        page.get_by_label("Why").fill("a probe")
        page.get_by_role("button", name="Discard 5").click()
        expect(page.locator("#live")).to_contain_text("done")
        expect(page.locator("#status")).to_contain_text("Live")
        settled = [status for status, _, _ in states(database_url)]
        assert settled.count("DISCARDED") == 5

        page.goto(f"{address}/jobs")
        page.get_by_role("button", name="Cancel the job of message").click()
        expect(page.locator("#live")).to_contain_text("cancelled by ann")
        query = "SELECT state FROM inbox.job"
        assert execute(database_url, query) == [("waiting",)]

        page.goto(f"{address}/dead-letters")
        expect(page.locator("#status")).to_contain_text("Live")
        row = page.locator("a[id^='l-']").first
        row.focus()
        focused = page.evaluate("document.activeElement.id")
        give_up(database_url, Message("late", 1), reason="came later")
        expect(page.locator("#live")).to_contain_text("came later")
        assert page.evaluate("document.activeElement.id") == focused
        box = page.locator("input[type=checkbox]").first
        box.check()
        give_up(database_url, Message("late", 1), reason="came last")
        expect(page.locator("#status")).to_contain_text("rows are checked")
        expect(box).to_be_checked()
        box.uncheck()
        expect(page.locator("#live")).to_contain_text("came last")
        process.kill()
        expect(page.locator("#status")).to_contain_text("the connection is lost")
        give_up(database_url, Message("late", 1), reason="while it was away")
        options = ("--tokens", tokens, "--listen", address.removeprefix("http://"))
        with served(database_url, tmp_path / "again", *options):
            page.get_by_label("Token").fill(TOKEN)
            page.get_by_role("button", name="Log in").click()
            page.goto(f"{address}/dead-letters")
            expect(page.locator("#live")).to_contain_text("while it was away")
            expect(page.locator("#status")).to_contain_text("Live")
