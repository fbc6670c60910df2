"""Migrations change the server's roles, so one worker at a time makes or drops them."""

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

import pytest

from outbox.cli.main import main
from outbox.testing.postgres import PostgresServer
from tests.fixtures.postgres import Template, one_at_a_time
from tests.fixtures.waiting import let_pass

Findings: TypeAlias = list[dict[str, str]]
Doctor: TypeAlias = Callable[[str], tuple[int, Findings]]


@pytest.fixture(autouse=True)
def one_day() -> None:
    """Let no day end while a test counts days: near midnight, wait for the next."""
    now = datetime.now(UTC)
    midnight = (now + timedelta(days=1)).replace(hour=0, minute=0, second=0)
    if midnight - now < timedelta(minutes=1):
        let_pass((midnight - now).total_seconds())


@pytest.fixture
def alone(server: PostgresServer, template: Template) -> Iterator[None]:
    with one_at_a_time(server):
        yield


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Ask the doctor; give the exit status and the findings."""

    def ask(url: str) -> tuple[int, Findings]:
        capsys.readouterr()  # what others printed before
        status = main(["doctor", "--json", "--database", url])
        report = json.loads(capsys.readouterr().out)
        assert report["status"] == status
        # That nothing has driven it yet is no fault of what the test breaks.
        return status, [
            f
            for f in report["findings"]
            if "upkeep has not run" not in f["finding"] and f["severity"] != "hint"
        ]

    return ask
