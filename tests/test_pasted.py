"""What people are to paste quotes each value for where it goes: SQL or a shell."""

import ast
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from uuid import uuid4

import pytest

from pillarbox import Message
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.doctor import Doctor
from tests.fixtures.readers import add_consumer
from tests.fixtures.relay import insert
from tests.fixtures.roles import new_role
from tests.fixtures.sessions import execute
from tests.migrations.test_hostile_path import is_superuser
from tests.outbox.administration.test_upkeep import old_partition

ROOT: Final = Path(__file__).parent.parent
SHELL: Final = re.compile(
    r"\bpillarbox (?!inbox)[a-z-]+( [a-z]+)?( [A-Z:]+| --[a-z-]+( \w+)?| x)* $"
    r"|^--[a-z-]+ $"
)
SQL: Final = re.compile(
    r"\b(ALTER [A-Z]+|GRANT|REVOKE|DROP [A-Z]+|COMMIT PREPARED|DELETE FROM"
    r"|SELECT [a-z_.]+\()[^;:,]*$"
)
QUOTED: Final = re.compile(r"(for_shell|for_sql)\(")
# Numbers, words of ours, and what isn't to be pasted.
OURS: Final = {
    *("pin.pid", "job.jobid", "pid", "id", "os.getpid()", "processes"),
    *("letters.side", "policy.parent_table", "roles", "table"),
    *("remove", "option", "against", "host"),
    *("name", "words"),  # quoted just before
}
COMMENT: Final = re.compile(
    r"/\*(?!/)[^*]*?%\d*\$?[sIL].*?\*/|-- [^\n]*%%?\d*\$?[sIL]\b"
)


def python_files() -> Iterator[Path]:
    for room in ("outbox", "inbox", "relay"):
        for file in (ROOT / room).rglob("*.py"):
            if not {"testing", "demo", "dev"} & set(file.parts):
                yield file


def unquoted(file: Path) -> Iterator[str]:
    """Yield the values in a module's f-strings that follow a command or SQL."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.JoinedStr):
            continue
        before = ""
        for part in node.values:
            if isinstance(part, ast.Constant):
                before += str(part.value)
                continue
            assert isinstance(part, ast.FormattedValue)
            value = ast.unparse(part.value)
            is_pasted = SHELL.search(before) or SQL.search(before)
            if is_pasted and not QUOTED.match(value) and value not in OURS:
                place = f"{file.relative_to(ROOT)}:{node.lineno}"
                yield f"{place}: {before[-40:]}{{{value}}}"
            before += "x"


def test_python_quotes_what_it_puts_into_commands_and_sql() -> None:
    assert [it for file in python_files() for it in unquoted(file)] == []


def test_sql_puts_no_value_into_a_comment_of_a_remedy() -> None:
    assert [it for file in sql_files() for it in commented(file)] == []


def sql_files() -> Iterator[Path]:
    for room in ("outbox", "inbox", "relay", "migrations"):
        yield from (ROOT / room).rglob("*.sql")


def commented(file: Path) -> Iterator[str]:
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.lstrip().startswith("--") and COMMENT.search(line):
            yield f"{file.relative_to(ROOT)}: {line.strip()}"


def test_a_column_of_the_applications_own_escapes_from_no_remedy(
    database_url: str, server: PostgresServer
) -> None:
    with new_role(database_url, f"app_{uuid4().hex[:8]}") as app:
        old_partition(database_url, 20)
        ((partition,),) = execute(
            database_url,
            "SELECT partition::text FROM outbox.partitions('outbox.message')"
            " ORDER BY starts_at LIMIT 1",
        )
        column = f'"x */ ALTER ROLE {app} SUPERUSER; /*"'
        execute(
            database_url,
            f"CREATE SCHEMA shop; CREATE TABLE shop.order ({column} {partition});"
            f"CREATE VIEW shop.{column} AS SELECT * FROM {partition}",
        )
        remedies = execute(
            database_url,
            "SELECT remedy"
            " FROM outbox.in_the_way('drop', 'outbox.message', %s, '', '')",
            (partition,),
        )
        assert len(remedies) > 1
        for (remedy,) in remedies:
            subprocess.run(
                ["psql", "-X", "-q", database_url], input=remedy, text=True, check=True
            )
        assert not is_superuser(server, app)


def test_a_topic_in_a_command_is_one_word(
    unread_database_url: str, doctor: Doctor, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    add_consumer(unread_database_url, "billing", "orders")
    insert(unread_database_url, Message(f"x; touch {made} #\ntouch {made}", b""))
    (remedy,) = (
        it["remedy"]
        for it in doctor(unread_database_url)[1]
        if "--topic" in it["remedy"]
    )
    command = remedy.partition("  #")[0].replace("pillarbox", "printf %s.")
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=True
    )
    topic = f"x; touch {made} #\\ntouch {made}"
    assert f"--from-oldest.--topic.{topic}." in done.stdout
    assert not made.exists()


def test_a_role_with_a_hostile_name_breaks_out_of_no_statement_and_no_command(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with new_role(database_url, f'"\'$(x) {uuid4().hex[:8]}_maintainer"') as evil:
        execute(
            database_url,
            "REVOKE ALL ON ROUTINE outbox.maintain FROM pillarbox_maintainer;"
            f" GRANT EXECUTE ON ROUTINE outbox.maintain TO {evil}",
        )
        assert main(["doctor", "--json", "--database", database_url]) == 3
    findings = json.loads(capsys.readouterr().out)["findings"]
    commands = {f["remedy"] for f in findings if "--role-prefix" in f["remedy"]}
    assert commands
    for command in commands:
        _, _, _, prefix, *_ = shlex.split(command)
        assert prefix.startswith("'$(x) "), command
