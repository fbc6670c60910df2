"""The frame of the page: logins, forms, headers, errors, and its size."""

import re
from importlib.resources import files
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import HTTPConnection
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.testing.events import RecordedEvents
from pillarbox.outbox.web import Settings, TokenLogin, Viewer, web_app
from pillarbox.outbox.web.events import RequestFailed
from pillarbox.outbox.web.login import read_tokens
from tests.fixtures.readers import add_consumer
from tests.fixtures.sessions import execute
from tests.fixtures.web import ANN, BOB, TOKENS, as_role, browsing

MOST_BYTES = 30_000


def routes(method: str) -> list[str]:
    app = web_app(Settings(database="postgresql://nowhere"), TokenLogin(TOKENS))
    return [
        route.path
        for route in app.routes
        if isinstance(route, Route) and method in (route.methods or ())
    ]


PUBLIC = {"/", "/login", "/logout"}
ACTIONS = sorted(set(routes("POST")) - PUBLIC)
PAGES = sorted(set(routes("GET")) - PUBLIC)


def address(path: str) -> str:
    return path.replace("{side}", "outbox").replace("{id:uuid}", "0" * 32)


def test_pages_and_actions_need_a_login() -> None:
    with browsing("postgresql://nowhere", token=None) as browser:
        for path in map(address, ACTIONS):
            browser.post_raw(path, {"kind": "discard"})
            assert (path, browser.status) == (path, 401)
        browser.client.follow_redirects = False
        for path in map(address, PAGES):
            browser.get(path)
            assert (path, browser.status) == (path, 303)
            answer = browser.client.get(path, headers={"accept": "*/*"})
            assert (path, answer.status_code) == (path, 401)


def test_a_connection_string_is_refused_without_its_password() -> None:
    with (
        pytest.raises(ConfigError, match="use postgresql://") as refused,
        browsing("host=db password=hemlighet"),
    ):
        pass
    assert "hemlighet" not in str(refused.value)


@pytest.mark.parametrize(
    ("origin", "is_secure"),
    [("https://testserver", True), ("http://testserver", False), (None, False)],
)
def test_the_cookie_is_secure_if_the_browser_speaks_https(
    origin: str | None, is_secure: bool
) -> None:
    headers = {} if origin is None else {"origin": origin}
    with browsing("postgresql://nowhere", token=None) as browser:
        browser.client.follow_redirects = False
        answer = browser.client.post("/login", data={"token": ANN}, headers=headers)
    assert ("; Secure" in answer.headers["set-cookie"]) == is_secure


ELSEWHERE = [
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"sec-fetch-site": "cross-site", "origin": "http://testserver"},
    {"sec-fetch-site": "same-site"},
]


def test_an_action_that_another_site_asks_for_is_refused(database_url: str) -> None:
    here = {"origin": "http://testserver"}
    with browsing(database_url) as browser:
        for path in ["/logout", *map(address, ACTIONS)]:
            for headers in ELSEWHERE:
                browser.post_raw(path, {"kind": "discard"}, **headers)
                assert (path, headers, browser.status) == (path, headers, 403)
        for headers in (here, {"sec-fetch-site": "same-origin", "host": "a.proxy"}):
            browser.post_raw("/dead-letters/plan", {"kind": "discard"}, **headers)
            assert (headers, browser.status) == (headers, 200)


def test_a_viewer_with_read_only_access_can_change_nothing(database_url: str) -> None:
    with browsing(database_url, token=BOB) as browser:
        for path in map(address, ACTIONS):
            browser.post_raw(path, {"kind": "discard"})
            said = "bob may not do that" in browser.text
            assert (path, browser.status, said) == (path, 403, True)


def test_logging_out_or_in_again_ends_the_login(database_url: str) -> None:
    with browsing(database_url) as browser:
        assert "ann" in browser.get("/dead-letters")
        first = dict(browser.client.cookies)
        browser.log_in()
        second = dict(browser.client.cookies)
        browser.post_raw("/logout", {})
        assert "Log in" in browser.get("/dead-letters")
        for kept in (first, second):
            browser.client.cookies.update(kept)
            assert "Log in" in browser.get("/dead-letters")


def test_a_wrong_token_is_refused_and_the_cookie_is_kept_from_scripts_and_other_sites(
    database_url: str,
) -> None:
    with browsing(database_url, token=None) as browser:
        browser.log_in("no such token at all")
        assert (browser.status, "This token is unknown" in browser.text) == (403, True)
        browser.post_raw("/login", {"token": "x" * 100_000})
        assert browser.status == 413
        browser.client.follow_redirects = False
        sent = browser.client.post("/login", data={"token": ANN})
    assert {"HttpOnly", "SameSite=strict"} <= set(
        sent.headers["set-cookie"].split("; ")
    )


def test_every_response_has_the_security_headers_and_only_static_files_are_cached(
    database_url: str,
) -> None:
    with browsing(database_url) as browser:
        (style,) = re.findall(r'href="([^"]*page\.css[^"]*)"', browser.get("/login"))
        for path in ("/login", "/dead-letters", "/no", style):
            headers = browser.client.get(path).headers
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy, path
            assert "unsafe" not in policy, path
            assert headers["x-content-type-options"] == "nosniff", path
            assert headers["x-frame-options"] == "DENY", path
            assert headers["referrer-policy"] == "same-origin", path
            kept = "no-cache" if path == style else "no-store"
            assert headers["cache-control"] == kept, path
        response = browser.client.get(style)
    assert response.headers["content-type"] == "text/css; charset=utf-8"


def test_a_page_has_no_inline_script_or_style_and_needs_no_other_server(
    database_url: str,
) -> None:
    templates = files("pillarbox.outbox.web") / "templates"
    for template in templates.iterdir():
        text = template.read_text()
        assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", text), template
        assert not re.search(r"<script(?! src=)", text), template
        assert "//" not in re.sub(r"{[{%].*?[%}]}", "x", text), template
    with browsing(database_url) as browser:
        text = browser.get("/dead-letters")
    links = re.findall(r'(?:src|href|action)="([^"]*)"', text)
    assert links
    assert [it for it in links if urlsplit(it).netloc] == []


def test_style_and_script_together_are_smaller_than_30_kb() -> None:
    static = files("pillarbox.outbox.web") / "static"
    assert sum(len(file.read_bytes()) for file in static.iterdir()) < MOST_BYTES


def test_the_error_for_an_unreachable_database_names_it_without_the_password() -> None:
    with browsing("postgresql://ann:secret@127.0.0.1:1/shop") as browser:
        text = browser.get("/dead-letters")
    assert browser.status == 503
    assert "can&#39;t reach the database postgresql://ann@127.0.0.1:1/shop" in text
    assert "secret" not in text


def test_the_roles_of_the_page_and_the_monitor_can_show_pages_and_others_cannot(
    database_url: str,
) -> None:
    add_consumer(database_url, "billing", "a")
    with browsing(as_role(database_url, "pillarbox_web")) as browser:
        for path in (*PAGES, "/consumer?name=billing"):
            if "{" not in path and path not in {"/message", "/consumer"}:
                browser.get(path)
                assert browser.status == 200, (path, browser.text)
    with browsing(as_role(database_url, "pillarbox_monitor")) as browser:
        browser.get("/dead-letters")
        assert browser.status == 200
    with browsing(as_role(database_url, "pillarbox_application")) as browser:
        text = browser.get("/dead-letters")
        assert (browser.status, "GRANT pillarbox_web" in text) == (503, True)


def test_the_page_reads_in_read_only_transactions(
    database_url: str,
) -> None:
    with browsing(database_url) as browser:
        browser.get("/dead-letters")
        frame = browser.client.app.state.frame
        portal = browser.client.portal
        assert portal is not None
        with pytest.raises(Exception, match="read-only transaction"):
            portal.call(
                frame.database.run,
                lambda connection: connection.execute("CREATE TABLE x ()"),
            )
    assert execute(database_url, "SELECT to_regclass('x')") == [(None,)]


def test_an_application_mounts_the_page_with_its_own_login(database_url: str) -> None:
    async def identify(connection: HTTPConnection) -> Viewer | None:
        user = connection.headers.get("x-user")
        return Viewer(name=user) if user else None

    page = web_app(Settings(database=database_url), identify)
    host = FastAPI()
    host.mount("/ops/pillarbox", page)
    for app in (host, Starlette(routes=[Mount("/ops/pillarbox", page)])):
        with TestClient(app, headers={"accept": "text/html"}) as client:
            assert client.get("/ops/pillarbox/").status_code == 401
            assert client.get("/ops/pillarbox/login").status_code == 404
            response = client.get("/ops/pillarbox/", headers={"x-user": "cleo"})
            assert (response.status_code, "cleo" in response.text) == (200, True)
            links = re.findall(r'(?:src|href|action)="([^"#]+)"', response.text)
            assert all(it.startswith("/ops/pillarbox/") for it in links)
            for link in links:
                answer = client.get(link, headers={"x-user": "cleo"})
                assert answer.status_code in {200, 405}, link


def test_an_error_in_the_hosts_code_is_an_event_and_shows_no_value(
    database_url: str,
) -> None:
    def identify(connection: HTTPConnection) -> Viewer | None:
        raise LookupError("who is s3cret?")

    events = RecordedEvents()
    settings = Settings(database=database_url, observers=(events,))
    with TestClient(web_app(settings, identify)) as client:
        response = client.get("/dead-letters")
    assert response.status_code == 500
    assert "LookupError: an error in pillarbox" in response.text
    assert "s3cret" not in response.text
    (event,) = events.of(RequestFailed)
    assert event.reason.startswith("LookupError: raised in test_an_error_in_the_hosts")
    assert "s3cret?" not in event.stacktrace.replace('"who is s3cret?"', "")


def test_a_file_of_tokens_says_what_each_viewer_is_allowed_to_do(
    tmp_path: Path,
) -> None:
    file = tmp_path / "tokens"
    file.write_text("# viewers\n\nann a-secret act payloads\nbob b-secret\n")
    assert read_tokens(str(file)) == {
        "a-secret": Viewer(name="ann", may_act=True, sees_payloads=True),
        "b-secret": Viewer(name="bob"),
    }
    one = "ann secret-secret-secret"
    for text, said in (
        ("ann", "write NAME TOKEN"),
        (f"{one} root", "write NAME TOKEN"),
        (f"{one}\nbob secret-secret-secret", "the same token"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=said) as refused:
            read_tokens(str(file))
        assert "secret-secret" not in str(refused.value)
    with pytest.raises(ConfigError, match="has 5 characters: use at least 16"):
        TokenLogin({"short": Viewer(name="ann")})
