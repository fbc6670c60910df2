"""Web frameworks under real servers: the guard, and writers whose commits fail."""

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import text

from pillarbox import Message, add
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from pillarbox.outbox.schema import metadata
from pillarbox.outbox.testing.lifetime import free_port
from tests.fixtures.processes import RunningProcess, command_line
from tests.fixtures.sessions import execute

Post = Callable[[object], tuple[int, Any]]

EXAMPLES = "examples.frameworks"
WRITERS = ("fastapi_writer", "litestar_writer", "django_writer", "flask_writer")


def saved(url: str) -> tuple[list[str], list[str]]:
    """Return the references of the orders, and the keys of the messages."""
    orders = execute(url, "SELECT reference FROM purchase ORDER BY id")
    messages = execute(url, "SELECT key FROM outbox.message ORDER BY seq")
    return [reference for (reference,) in orders], [key for (key,) in messages]


@contextmanager
def serving(app: str, url: str, log: Path, path: str = "/orders") -> Iterator[Post]:
    """Yield a function that posts JSON, and returns the status and the answer."""
    port = free_port()
    if app.endswith("flask_writer"):
        line = command_line("flask", "--app", app, "run", f"--port={port}")
    else:
        line = command_line("uvicorn", f"{app}:app", f"--port={port}")
    server = RunningProcess(line, log, {"PILLARBOX_DATABASE_URL": url})
    server.wait_for_log(f"unning on http://127.0.0.1:{port}")

    def post(body: object) -> tuple[int, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return int(answer.status), json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, None

    try:
        yield post
    finally:
        server.terminate()
        server.wait()


@contextmanager
def placing(app: str, url: str, log: Path) -> Iterator[Callable[[str], int]]:
    """Yield a function that places an order, and returns the status."""
    with serving(app, url, log) as post:
        yield lambda reference: post({"reference": reference})[0]


@pytest.mark.parametrize("writer", WRITERS)
def test_a_failed_commit_is_reported_to_the_client(
    writer: str, url: str, tmp_path: Path
) -> None:
    with placing(f"{EXAMPLES}.{writer}", url, tmp_path / "log") as post:
        assert post("a") == 201
        assert saved(url) == (["a"], ["a"])
        assert post("a") == 409
        assert saved(url) == (["a"], ["a"])
        assert post("b") == 201
    assert saved(url) == (["a", "b"], ["a", "b"])


def test_djangos_connection_takes_messages_in_an_atomic_block_only(
    url: str, tmp_path: Path
) -> None:
    process = RunningProcess(
        [sys.executable, "-m", "tests.inbox.frameworks.django_calls"],
        tmp_path / "log",
        {"PILLARBOX_DATABASE_URL": url},
    )
    assert process.wait() == 0, process.log()
    orders, keys = saved(url)
    assert orders == [
        f"{alias} {what}"
        for alias in ("default", "bound")
        for what in ("alone", "with messages")
    ]
    assert keys == ["first", "%s 'ä\\", "3"] * 2
    kept = execute(url, "SELECT headers, payload FROM outbox.message WHERE key='first'")
    assert kept == [({"h": "%s 'ä\\"}, b"\x00%s")] * 2


def test_flask_sqlalchemy_writes_messages_to_the_engine_of_their_bind_key(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = "postgresql+psycopg://nobody@/elsewhere"
    app.config["SQLALCHEMY_BINDS"] = {"shop": sqlalchemy_url(url)}
    db = SQLAlchemy(app)
    monkeypatch.setitem(metadata.info, "bind_key", "shop")

    with app.app_context():
        add(db.session, Message("t", b"", key="rolled back"))
        db.session.flush()
        db.session.rollback()
        add(db.session, Message("t", b"", key="a"))
        db.session.execute(
            text("INSERT INTO purchase (reference) VALUES ('a')"),
            bind_arguments={"bind": db.engines["shop"]},
        )
        db.session.commit()
        for engine in db.engines.values():
            engine.dispose()

    assert saved(url) == (["a"], ["a"])


def test_an_event_that_is_sent_again_is_handled_once(
    url: str, invoices: Callable[[], list[int]], tmp_path: Path
) -> None:
    app = f"{EXAMPLES}.fastapi_app"
    with serving(app, url, tmp_path / "log", path="/events") as post:
        assert post({"id": "evt_1", "order_id": 1}) == (200, {"handled": True})
        assert post({"id": "evt_1", "order_id": 1}) == (200, {"handled": False})
        assert post({"id": "evt_2", "order_id": 2}) == (200, {"handled": True})
        assert invoices() == [1, 2]

        # An order that can't be billed leaves no receipt: the sender can retry.
        assert post({"id": "evt_3", "order_id": 2**40}) == (500, None)
        assert post({"id": "evt_3", "order_id": 3}) == (200, {"handled": True})
        assert invoices() == [1, 2, 3]
