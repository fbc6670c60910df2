"""The grants are declared once, for both the migrations and the doctor."""

from importlib.resources import files

import pytest

from outbox.administration.names import ROLES
from tests.fixtures.sessions import execute

FOLDER = files("outbox.migrations")
RIGHTS = (
    "SELECT relation, substring(fact FROM '^right of pillarbox_(\\S+) to '),"
    " substring(fact FROM ' to (\\S+)') FROM outbox.promise"
    " WHERE fact LIKE 'right of %'"
)


def test_all_roles_are_in_one_list(database_url: str) -> None:
    assert {role for _, role, _ in execute(database_url, RIGHTS)} == set(ROLES) - {
        "owner"
    }
    for file in ("check.sql", "roles.sql", "remove_roles.sql"):
        script = FOLDER.joinpath(file).read_text(encoding="utf-8")
        assert [role for role in ROLES if f"{{{role}_name}}" not in script] == []


@pytest.mark.parametrize(
    "table", ["outbox.message", 'outbox."position"', "outbox.deferral"]
)
def test_no_role_can_change_rows_that_are_written_once(
    table: str, database_url: str
) -> None:
    rights = execute(database_url, RIGHTS)

    assert {right for name, _, right in rights if name == table} == {"SELECT", "INSERT"}


def test_no_routine_that_writes_is_open_to_all(database_url: str) -> None:
    granted = {n for n, _, right in execute(database_url, RIGHTS) if right == "EXECUTE"}
    is_open = "SELECT has_function_privilege('public', %s, 'EXECUTE')"

    assert [
        name for name in granted if execute(database_url, is_open, [name])[0][0]
    ] == ["inbox.moment_of(uuid)"]
