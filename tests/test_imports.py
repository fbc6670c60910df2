"""What each process imports: SQLAlchemy only if it writes, a driver only to relay."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import pillarbox
import pillarbox.testing
from pillarbox.outbox.cli.command import FAILED

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"
ADD = "from pillarbox import add"
WRITER = "the writer imports only its own modules"


def printed(*statements: str) -> set[str]:
    code = "; ".join(statements)
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(said.stdout.split())


def loaded(*statements: str) -> set[str]:
    return printed(*statements, "import sys", "print(*sys.modules)")


def packages(modules: set[str]) -> set[str]:
    # The module of the interpreter's build settings is named after its platform.
    ours = {name for name in modules if not name.startswith("_sysconfigdata")}
    return {name.partition(".")[0] for name in ours} - sys.stdlib_module_names


def writers_modules() -> set[str]:
    contracts = tomllib.loads(PYPROJECT.read_text())["tool"]["importlinter"][
        "contracts"
    ]
    (contract,) = (c for c in contracts if c["name"] == WRITER)
    return set(contract["source_modules"])


def test_add_loads_the_writers_modules_sqlalchemy_and_no_driver() -> None:
    everything = loaded(ADD)
    ours = {name for name in everything if name.startswith("pillarbox.")}
    assert ours == writers_modules() | {"pillarbox.outbox"}
    others = everything - loaded("import sqlalchemy")
    assert packages(others) == {"pillarbox", "sqlalchemy"}
    assert not {"psycopg", "asyncpg", "sqlalchemy.ext.asyncio"} & everything


def test_import_pillarbox_loads_the_standard_library_alone() -> None:
    assert packages(loaded("import pillarbox") - loaded()) == {"pillarbox"}


@pytest.mark.parametrize("name", pillarbox.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(pillarbox, name).__module__ != "pillarbox"


@pytest.mark.parametrize("name", pillarbox.testing.__all__)
def test_every_helper_for_tests_can_be_imported(name: str) -> None:
    assert getattr(pillarbox.testing, name).__module__ != "pillarbox.testing"


def test_what_was_added_is_asked_without_pytest_or_a_driver() -> None:
    everything = loaded("from pillarbox.testing import added")
    assert not {"pytest", "psycopg"} & everything


def test_a_process_that_writes_no_messages_loads_no_sqlalchemy() -> None:
    assert "sqlalchemy" not in loaded(
        "import pillarbox.relay, pillarbox.relay.cli, pillarbox.outbox.cli.main"
    )


HEAVY = {
    *("aiohttp", "alembic", "asyncio", "jinja2", "prometheus_client", "psycopg"),
    *("rich", "rich.progress", "sqlalchemy", "starlette", "uvicorn", "watchfiles"),
    *("pillarbox.inbox", "pillarbox.relay", "pillarbox.outbox.web"),
    *("pillarbox.outbox.dev", "pillarbox.outbox.testing"),
}
CONNECTED = {"asyncio", "psycopg"}  # psycopg imports asyncio
RUN = """
import sys
from pillarbox import main
status = main()
print(status, *sys.modules, file=sys.stderr)
"""
COMMANDS: dict[str, set[str]] = {
    "--version": set(),
    "--help": {"rich"},
    "status --help": {*CONNECTED, "rich"},
    "trace --help": {*CONNECTED, "rich"},
    "status": {*CONNECTED, "rich"},
    "trace 019a0000-0000-7000-8000-000000000000": CONNECTED,
    "blocked": CONNECTED,
    "jobs": {*CONNECTED, "pillarbox.inbox", "rich"},
    "dead-letters list": {*CONNECTED, "pillarbox.inbox", "pillarbox.relay"},
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_imports_only_what_it_uses(database_url: str, command: str) -> None:
    said = subprocess.run(
        [sys.executable, "-c", RUN, *command.split()],
        env={**os.environ, "PILLARBOX_DATABASE_URL": database_url},
        capture_output=True,
        text=True,
        check=False,
    )
    status, *imported = said.stderr.splitlines()[-1].split()
    assert int(status) != FAILED, said.stderr
    assert HEAVY.intersection(imported) == COMMANDS[command]


def test_public_names_are_listed_before_they_are_used() -> None:
    listed = printed("import pillarbox", "print(*dir(pillarbox))")
    assert set(pillarbox.__all__) <= listed


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'pillarbox' has no attribute 'Massage'"):
        _ = pillarbox.Massage
