"""Writers without a framework: psycopg, psql, and a trigger."""

import subprocess

import psycopg
import pytest

from examples.frameworks.psycopg_writer import place
from pillarbox.outbox.postgres.connection import conninfo
from tests.fixtures.passwords import PASSWORD
from tests.fixtures.processes import ROOT, command_line
from tests.fixtures.sessions import execute

EXAMPLES = ROOT / "examples" / "frameworks"


@pytest.fixture
def application(url: str) -> str:
    """Return options of libpq that make a session one of the application."""
    execute(url, "GRANT INSERT ON purchase TO pillarbox_application")
    execute(url, "GRANT USAGE ON SEQUENCE purchase_id_seq TO pillarbox_application")
    return "-c role=pillarbox_application"


def saved(url: str) -> tuple[list[str], list[tuple[str, bytes]]]:
    """Return the references of the orders, and the keys and payloads of messages."""
    orders = execute(url, "SELECT reference FROM purchase ORDER BY id")
    messages = execute(url, "SELECT key, payload FROM outbox.message ORDER BY seq")
    return [reference for (reference,) in orders], messages


def psql(url: str, *arguments: str, options: str = "") -> str:
    """Run psql, and return what it says."""
    done = subprocess.run(
        ["psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", *arguments, conninfo(url)],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", **PASSWORD, "PGOPTIONS": options},
    )
    return done.stdout + done.stderr


def test_psycopgs_connection_commits_rows_and_messages_together(url: str) -> None:
    def run(*references: str) -> int:
        return subprocess.run(
            [
                *command_line("python")[:1],
                *("-m", "examples.frameworks.psycopg_writer", *references),
            ],
            check=False,
            capture_output=True,
            cwd=ROOT,
            env={"PATH": "", **PASSWORD, "PILLARBOX_DATABASE_URL": url},
        ).returncode

    assert run("A-1", "A-2") == 0
    assert run("A-3", "A-1") == 1
    messages = [
        ("A-1", b'{"reference":"A-1"}'),
        ("A-2", b'{"reference":"A-2"}'),
    ]
    assert saved(url) == (["A-1", "A-2"], messages)

    with psycopg.connect(conninfo(url)) as connection:
        place(connection, "A-4")
        connection.rollback()
    assert saved(url) == (["A-1", "A-2"], messages)


def test_psql_commits_rows_and_messages_together(url: str, application: str) -> None:
    file = str(EXAMPLES / "writer.sql")
    added = psql(url, "-v", "reference=it's", "-f", file, options=application)
    assert "(1 row)" in added
    refused = psql(url, "-v", "reference=it's", "-f", file, options=application)
    assert "purchase_reference_key" in refused
    assert saved(url) == (["it's"], [("it's", b'{"reference": "it\'s"}')])


def test_a_trigger_adds_messages_of_roles_that_may_not(url: str) -> None:
    assert psql(url, "-f", str(EXAMPLES / "trigger.sql")) == ""
    # A role of pillarbox that may not add messages.
    execute(url, "GRANT INSERT ON purchase TO pillarbox_monitor")
    execute(url, "GRANT USAGE ON SEQUENCE purchase_id_seq TO pillarbox_monitor")
    monitor = "-c role=pillarbox_monitor"
    direct = "SELECT outbox.add('t', '{}')"
    assert "permission denied" in psql(url, "-c", direct, options=monitor)

    insert = "INSERT INTO purchase (reference) VALUES ('A-1'), ('A-2')"
    assert psql(url, "-c", insert, options=monitor) == ""
    assert psql(url, "-c", f"BEGIN; {insert}; ROLLBACK", options=monitor) == ""
    orders, messages = saved(url)
    assert orders == [key for key, _ in messages] == ["A-1", "A-2"]
