"""`pillarbox web`: it starts, stops, and says where to log in."""

import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from contextlib import closing
from http.client import HTTPConnection
from http.cookiejar import CookieJar
from pathlib import Path

import pytest

from pillarbox.outbox.cli.main import main
from tests.fixtures.processes import RunningProcess, command_line
from tests.fixtures.web import served


def opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(
        urllib.request.HTTPCookieProcessor(CookieJar()),
        urllib.request.ProxyHandler({}),
    )


def log_in(address: str, token: str) -> urllib.request.OpenerDirector:
    browser = opener()
    fields = urllib.parse.urlencode({"token": token}).encode()
    browser.open(f"{address}/login", fields).read()
    return browser


def test_the_command_prints_a_link_with_a_token_that_appears_nowhere_else(
    database_url: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with served(database_url, log) as (process, address):
        process.wait_for_log("Log in at")
        ((link, token),) = re.findall(r"Log in at (\S+)#(\S+)", process.log())
        assert link == f"{address}/login"
        page = log_in(address, token).open(f"{address}/dead-letters").read()
        assert b"read-only" in page
        with pytest.raises(urllib.error.HTTPError):
            log_in(address, "no such token at all")
        process.wait_for_log("LoginRefused")
        assert process.log().count(token) == 1


def test_the_server_keeps_its_port_and_stops_while_a_page_is_open(
    database_url: str, tmp_path: Path
) -> None:
    with served(database_url, tmp_path / "log") as (process, address):
        where = urllib.parse.urlsplit(address)
        browser = HTTPConnection(where.hostname or "", where.port)
        with closing(browser):
            browser.request("GET", "/login")
            assert browser.getresponse().read()
            arguments = command_line("pillarbox", "web", "--listen", where.netloc)
            second = RunningProcess(
                arguments, tmp_path / "other", {"PILLARBOX_DATABASE_URL": database_url}
            )
            assert second.wait() == 2
            assert f"listen={where.netloc}: " in second.log()
            process.terminate()
            assert process.wait() == 0
    assert "Traceback" not in process.log()


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [it for it in sys.modules if it.startswith("pillarbox.outbox.web")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main(["web"]) == 2
    assert "the page needs jinja2: pip install 'pillarbox[web]'" in (
        capsys.readouterr().err
    )
