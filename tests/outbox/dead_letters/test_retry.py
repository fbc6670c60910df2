"""`dead-letters retry` uses the relay's publisher or the consumer's handlers."""

import json
from pathlib import Path
from typing import Any

import pytest

from outbox.cli.main import main
from pillarbox import Message
from tests.acceptance.relays import as_role
from tests.fixtures.dead_letters import give_up, states
from tests.fixtures.sessions import execute


def test_the_relay_retries_with_the_publisher_of_the_broker(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    execute(database_url, "INSERT INTO inbox.subscription VALUES ('billing', 'orders')")
    (id, _, nobody) = give_up(
        database_url,
        Message("orders", b"1"),
        Message("orders", b"2"),
        Message("nobody", b""),
    )
    url = as_role(database_url, "pillarbox_relay")
    argv = ["dead-letters", "retry", "--side=outbox"]
    argv += [f"--database={url}", f"--broker={url}"]

    assert main([*argv, "--topic=*", "--dry-run"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert main([*argv, "--limit", "1", "--dry-run", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 1
    assert main([*argv, str(id)]) == 0
    assert capsys.readouterr().out == "1 retried: 1 succeeded, 0 failed, 0 skipped\n"
    assert main([*argv, "--topic=*", "--rate", "1000/s"]) == 1
    why, sum_ = capsys.readouterr().out.splitlines()
    assert why.startswith(f"{nobody} of nobody failed: ")
    assert "subscribe" in why
    assert sum_ == "2 retried: 1 succeeded, 1 failed, 0 skipped"
    delivered = "SELECT payload FROM inbox.message ORDER BY seq"
    assert execute(database_url, delivered) == [(b"1",), (b"2",)]


def test_the_relay_reports_that_its_broker_is_unavailable(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    give_up(database_url, Message("orders", b"1"))
    argv = ["dead-letters", "retry", "--side=outbox", "--topic=*"]
    argv += [f"--database={database_url}"]
    assert main([*argv, "--broker=redis://127.0.0.1:1"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    not_tried, reason = said.err.splitlines()[-2:]
    assert not_tried == "1 of 1 were not tried"
    assert reason.startswith("pillarbox: ")
    assert states(database_url) == [("PENDING", 0, "refused")]


APP = """
import os
from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker
from pillarbox import Consumer
from outbox.postgres.connection import sqlalchemy_url

engine = create_engine(sqlalchemy_url(os.environ["PILLARBOX_DATABASE_URL"]))
consumer = Consumer("memory:", sessionmaker(engine), name="billing")

@consumer.handles("orders")
def handle(session, message):
    if message.payload == b"bad":
        raise ValueError("bad")
"""


def test_the_inbox_retries_with_the_handlers_of_the_consumer(
    database_url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "retry_app.py").write_text(APP)
    monkeypatch.syspath_prepend(tmp_path)
    url = as_role(database_url, "pillarbox_consumer")
    monkeypatch.setenv("PILLARBOX_DATABASE_URL", url)
    messages = [Message("orders", b"good"), Message("orders", b"bad")]
    (_, bad) = give_up(database_url, *messages, schema="inbox")
    argv = ["dead-letters", "retry", "--side=inbox"]
    argv += ["--consumer=retry_app:consumer"]
    why = f"{bad} of orders failed: ValueError: bad\n"

    assert main([*argv, "--topic=*", "--dry-run"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main([*argv, "--topic=*"]) == 1
    assert capsys.readouterr().out == (
        f"{why}2 retried: 1 succeeded, 1 failed, 0 skipped\n"
    )
    assert main([*argv, "--error", "ValueError"]) == 1
    assert capsys.readouterr().out == (
        f"{why}1 retried: 0 succeeded, 1 failed, 0 skipped\n"
    )
    assert main([*argv, str(bad), "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "succeeded": 0,
        "failed": 1,
        "skipped": 0,
        "failures": [
            {
                "id": str(bad),
                "message_id": str(messages[1].id),
                "topic": "orders",
                "retry_count": 3,
                "reason": "ValueError: bad",
            }
        ],
    }
    rows: list[Any] = sorted(states(database_url, "inbox"))
    assert rows == [("PENDING", 3, "ValueError: bad"), ("SUCCEEDED", 0, "refused")]
