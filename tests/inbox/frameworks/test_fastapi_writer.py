"""FastAPI's writer under a real server, with a commit that fails."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from examples.frameworks.fastapi_writer import Base
from outbox.postgres.connection import sqlalchemy_url
from outbox.testing.lifetime import free_port
from tests.fixtures.processes import RunningProcess, command_line
from tests.fixtures.sessions import execute

Post = Callable[[str], int]


@pytest.fixture
def url(database_url: str) -> str:
    engine = create_engine(sqlalchemy_url(database_url))
    Base.metadata.create_all(engine)
    engine.dispose()
    return database_url


def saved(url: str) -> tuple[int, int]:
    """Count the orders and their messages."""
    ((orders,),) = execute(url, "SELECT count(*) FROM purchase")
    ((messages,),) = execute(url, "SELECT count(*) FROM outbox.message")
    return orders, messages


@contextmanager
def serving(app: str, url: str, log: Path) -> Iterator[Post]:
    """Yield a function that places an order and returns the status."""
    port = free_port()
    server = RunningProcess(
        command_line("uvicorn", app, f"--port={port}"),
        log,
        {"PILLARBOX_DATABASE_URL": url},
    )
    server.wait_for_log("Uvicorn running")

    def post(reference: str) -> int:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/orders",
            json.dumps({"reference": reference}).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    try:
        yield post
    finally:
        server.terminate()
        server.wait()


def test_a_failed_commit_is_reported_to_the_client(url: str, tmp_path: Path) -> None:
    app = "examples.frameworks.fastapi_writer:app"
    with serving(app, url, tmp_path / "log") as post:
        assert post("a") == 201
        assert saved(url) == (1, 1)
        assert post("a") == 409
        assert saved(url) == (1, 1)
        assert post("b") == 201
    assert saved(url) == (2, 2)


def test_the_usual_dependency_answers_201_and_saves_nothing(
    url: str, tmp_path: Path
) -> None:
    app = "tests.inbox.frameworks.late_commit:app"
    with serving(app, url, tmp_path / "log") as post:
        assert [post("a"), post("a")] == [201, 201]
    assert saved(url) == (1, 1)
    assert "UniqueViolation" in (tmp_path / "log").read_text()
