"""A script is split at every semicolon that ends a statement, and at no other."""

import re
from importlib.resources import files

import pytest

from outbox.migrations.statements import split_statements, without_comments

FOLDER = files("outbox.migrations")
SCRIPTS = sorted(
    f"versions/{file.name}"
    for file in FOLDER.joinpath("versions").iterdir()
    if file.name.endswith(".sql")
)


@pytest.mark.parametrize(
    ("script", "statements"),
    [
        ("SELECT 1; SELECT 2", ["SELECT 1", "SELECT 2"]),
        ("-- only; a comment\n", []),
        ("-- why; so\nSELECT 1;", ["-- why; so\nSELECT 1"]),
        ("SELECT ';''; ', \"a;b\";", ["SELECT ';''; ', \"a;b\""]),
        ("DO $b$ BEGIN; $x$;$x$ END; $b$; RESET ROLE;", None),
        (
            "EXECUTE 'x' USING $1, $2; SELECT 1;",
            ["EXECUTE 'x' USING $1, $2", "SELECT 1"],
        ),
        (
            "CREATE FUNCTION f() BEGIN ATOMIC SELECT CASE WHEN a THEN b END; END; X;",
            [
                "CREATE FUNCTION f() BEGIN ATOMIC SELECT CASE WHEN a THEN b END; END",
                "X",
            ],
        ),
        ("BEGIN; SELECT 1; COMMIT;", ["BEGIN", "SELECT 1", "COMMIT"]),
    ],
)
def test_a_script_is_split(script: str, statements: list[str] | None) -> None:
    if statements is None:
        statements = ["DO $b$ BEGIN; $x$;$x$ END; $b$", "RESET ROLE"]
    assert list(split_statements(script)) == statements


@pytest.mark.parametrize("name", [*SCRIPTS, "grants.sql"])
def test_no_part_of_a_script_is_lost(name: str) -> None:
    script = FOLDER.joinpath(name).read_text()

    joined = ";".join(split_statements(script))

    assert "".join(joined.split()) in "".join(script.split()).replace(";;", ";")
    for statement in split_statements(script):
        assert re.match(r"[A-Z]", without_comments(statement))
