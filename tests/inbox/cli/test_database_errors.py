"""What `jobs`, `cancel` and `subscribe` say if the database can't serve them."""

from typing import cast

import pytest

from outbox.cli.main import main
from pillarbox import uuid7
from tests.acceptance.relays import as_role

Capture = pytest.CaptureFixture[str]
COMMANDS = (
    ("jobs",),
    ("cancel", str(uuid7()), "--consumer", "billing"),
    ("subscribe", "billing", "orders"),
    ("unsubscribe", "billing", "orders"),
)


@pytest.fixture(params=COMMANDS, ids=lambda command: command[0])
def command(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return cast(tuple[str, ...], request.param)


def refusal(command: tuple[str, ...], url: str, capsys: Capture) -> str:
    assert main([*command, "--database", url]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    return line


def test_a_database_without_tables_is_to_be_migrated(
    command: tuple[str, ...], empty_database_url: str, capsys: Capture
) -> None:
    assert "run pillarbox migrate" in refusal(command, empty_database_url, capsys)


def test_a_missing_privilege_is_named_with_the_role_to_grant(
    command: tuple[str, ...], database_url: str, capsys: Capture
) -> None:
    said = refusal(command, as_role(database_url, "pillarbox_relay"), capsys)
    assert "permission denied" in said
    assert "grant the role pillarbox_consumer to its user" in said


def test_an_unreachable_database_is_named_without_its_password(
    command: tuple[str, ...], capsys: Capture
) -> None:
    url = "postgresql://jane:secret@127.0.0.1:1/shop"
    said = refusal(command, url, capsys)
    assert "can't reach the database postgresql://jane" in said
    assert "secret" not in said
