"""Logs and commands escape foreign text before it reaches a terminal."""

import logging

import pytest
from psycopg import sql

from pillarbox import Message, uuid7
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.message_id import moment_of
from pillarbox.outbox.observability.logging import LogEvents, PrintableFormatter
from pillarbox.relay.events import MessageRefused
from tests.fixtures.dead_letters import give_up
from tests.fixtures.positions import defer, publish
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute

# Clears the screen, sets the title, a C1 CSI, a bidi override, a forged log line.
HOSTILE = "x\x1b[2J\x1b]0;owned\x07\x9b31m\u202e\u2066\r\nERROR\u2028root:"
BAD = ("\x1b", "\x07", "\x9b", "\u202e", "\u2066", "\u2028", "\r")


def check_escaped(said: str) -> None:
    assert "\\x1b[2J" in said
    assert [c for c in BAD if c in said] == []
    assert not any(line.startswith("ERROR") for line in said.splitlines())


@pytest.fixture
def hostile_rows(database_url: str) -> str:
    """Store hostile text in every field that can hold text."""
    message = Message(
        HOSTILE, HOSTILE.encode(), key=HOSTILE, headers={HOSTILE: HOSTILE}
    )
    for schema in ("outbox", "inbox"):
        give_up(
            database_url,
            message,
            schema=schema,
            reason=HOSTILE,
            stacktrace=HOSTILE,
            origin=f"consumer:{HOSTILE}",
        )
    insert(database_url, message, Message(HOSTILE, b"", key="other"))
    publish(database_url, "key = 'other'")
    defer(database_url, "refused", attempts=1, reason=HOSTILE)
    id = uuid7()
    execute(
        database_url,
        "INSERT INTO inbox.job (message_id, message_at, consumer, topic, key, worker,"
        " state, started_at)"
        " VALUES (%s, %s, %s, %s, %s, %s, 'in_progress', now())",
        [id, moment_of(id), *([HOSTILE] * 4)],
    )
    return database_url


def test_commands_show_foreign_text_escaped(
    hostile_rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    query = "SELECT id::text, message_id::text FROM outbox.dead_letter"
    ((outbox, message),) = execute(hostile_rows, query)
    ((inbox,),) = execute(hostile_rows, "SELECT id::text FROM inbox.dead_letter")

    def said_by(status: int, *arguments: str) -> str:
        assert main([*arguments, "--database", hostile_rows]) == status, arguments
        printed = capsys.readouterr()
        return printed.err if status == 2 else printed.out

    check_escaped(said_by(1, "status"))
    check_escaped(said_by(0, "dead-letters", "list"))
    check_escaped(said_by(0, "blocked"))
    check_escaped(said_by(0, "replay", "--since", "1h", "--dry-run"))
    check_escaped(said_by(0, "jobs"))
    check_escaped(said_by(0, "readers", "add", f"n{HOSTILE}", "--consumer"))
    check_escaped(said_by(0, "trace", message))
    check_escaped(said_by(0, "trace", "--key", HOSTILE))
    check_escaped(said_by(2, "trace", HOSTILE))
    for id in (outbox, inbox):
        head, _, rest = said_by(0, "dead-letters", "show", id).partition("\npayload (")
        check_escaped(head)
        assert "\x1b" not in rest


def test_the_doctor_escapes_the_names_of_relations(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = sql.Identifier("outbox", "message_default\x1b[2J").as_string()
    execute(database_url, f"CREATE TABLE {name} PARTITION OF outbox.message DEFAULT")

    main(["doctor", "--database", database_url])
    said = capsys.readouterr().out
    main(["partitions", "--database", database_url])
    said += capsys.readouterr().out

    check_escaped(said)


def test_the_error_of_a_command_is_one_escaped_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["blocked", "--side", f"nonsense\x1b[2J{HOSTILE}"]) == 2
    check_escaped(capsys.readouterr().err)


def test_an_event_and_a_record_of_any_library_are_logged_escaped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "pillarbox")
    key = "a\x1b[2J"
    LogEvents()(
        MessageRefused(id=uuid7(), topic=HOSTILE, key=key, attempts=1, reason="")
    )
    check_escaped(caplog.messages[0])
    assert "key=a\\x1b[2J" in caplog.messages[0]

    said = PrintableFormatter("%(levelname)s %(message)s").format(
        logging.makeLogRecord({"msg": f"got {HOSTILE}", "levelname": "INFO"})
    )
    check_escaped(said)
    assert said.startswith("INFO got x")
