"""The grants are declared once, for both the migrations and the doctor."""

import re
from importlib.resources import files

import pytest

from outbox.administration.names import ROLES, Names
from outbox.migrations.grants import (
    closed_routines,
    rights,
)

FOLDER = files("outbox.migrations")


def test_every_object_of_a_statement_is_read() -> None:
    """A statement that isn't understood would grant what the doctor doesn't check."""
    versions = FOLDER.joinpath("versions").iterdir()
    scripts = [f.read_text("utf-8") for f in versions if "grants" in f.name]
    names = {right.name for right in rights()} | set(closed_routines())
    found = re.findall(r"\b(?:outbox|inbox)\.\w+", "".join(scripts))

    assert {name.partition("(")[0] for name in names} == {*found, "outbox", "inbox"}
    assert sum(len(re.findall(r"^GRANT ", s, re.MULTILINE)) for s in scripts) == sum(
        s.count("GRANT ") for s in scripts
    )


def test_all_roles_are_in_one_list() -> None:
    assert {right.role for right in rights()} == set(ROLES) - {"owner"}
    for file in ("check.sql", "roles.sql", "remove.sql"):
        script = FOLDER.joinpath(file).read_text(encoding="utf-8")
        assert [role for role in ROLES if f"{{{role}_name}}" not in script] == []


def test_each_privilege_is_granted_by_one_line() -> None:
    (right,) = (
        right
        for right in rights()
        if right.role == "relay"
        and right.name == "outbox.dead_letter"
        and right.privilege == "UPDATE"
    )
    assert Names(role_prefix="shop").fill(right.grant) == (
        "GRANT UPDATE (status, retry_count, retry_after, updated_at, error_reason,"
        " error_stacktrace, discard_reason, discarded_by) ON outbox.dead_letter TO"
        ' "shop_relay";'
    )


WRITTEN_ONCE = (
    "outbox.message",
    "outbox.settlement",
    "outbox.deferral",
    "outbox.watermark",
)


@pytest.mark.parametrize("table", WRITTEN_ONCE)
def test_no_role_can_change_rows_that_are_written_once(table: str) -> None:
    privileges = {right.privilege for right in rights() if right.name == table}

    assert privileges == {"SELECT", "INSERT"}


def test_only_granted_roles_can_run_a_restricted_routine() -> None:
    routines = {r.name for r in rights() if r.privilege == "EXECUTE"}
    assert routines - set(closed_routines()) == {"inbox.moment_of(uuid)"}
