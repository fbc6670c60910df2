"""The rights of each role, read from the statements that grant them: `*.grants.sql`."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import product
from typing import Final

from outbox.migrations.statements import split_statements, without_comments

_GRANT: Final = re.compile(r"GRANT (.+) ON (?:([A-Z]+) )?(.+) TO (.+)")
_CLOSE: Final = re.compile(r"REVOKE ALL ON ([A-Z]+) (.+) FROM PUBLIC")
_COMMA: Final = re.compile(r", (?![^(]*\))")


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """One privilege of one role on one object.

    Attributes:
        role: its name without the prefix.
        columns: none for the whole object.
        kind: SCHEMA, TABLE, SEQUENCE, FUNCTION or PROCEDURE.
        name: with its schema; routines with the types of their arguments.
    """

    role: str
    privilege: str
    columns: tuple[str, ...]
    kind: str
    name: str

    @property
    def grant(self) -> str:
        """The statement that grants it."""
        columns = f" ({', '.join(self.columns)})" if self.columns else ""
        kind = "" if self.kind == "TABLE" else f"{self.kind} "
        return (
            f"GRANT {self.privilege}{columns} ON {kind}{self.name} TO {{{self.role}}};"
        )


def rights() -> Iterator[Right]:
    """Yield every right that the statements grant."""
    return _rights(_scripts())


def closed_routines() -> dict[str, str]:
    """Return the routines that PUBLIC may not run, each with its kind."""
    return {
        name: closed[1]
        for statement in _statements(_scripts())
        if (closed := _CLOSE.fullmatch(statement))
        for name in _COMMA.split(closed[2])
    }


def revoke_all(script: str) -> str:
    """Return the statement that revokes whatever a script grants on tables."""
    granted = [right for right in _rights(script) if right.kind == "TABLE"]
    tables = ", ".join(dict.fromkeys(right.name for right in granted))
    roles = ", ".join(dict.fromkeys(f"{{{right.role}}}" for right in granted))
    return f"REVOKE ALL ON {tables} FROM {roles}"


def _rights(script: str) -> Iterator[Right]:
    for statement in _statements(script):
        if grant := _GRANT.fullmatch(statement):
            may, kind, names, roles = grant.groups()
            for role, name, privilege in product(
                *map(_COMMA.split, (roles, names, may))
            ):
                word, _, columns = privilege.rstrip(")").partition(" (")
                yield Right(
                    role=role.strip("{}"),
                    privilege=word,
                    columns=tuple(_COMMA.split(columns)) if columns else (),
                    kind=kind or "TABLE",
                    name=name,
                )


def _statements(script: str) -> Iterator[str]:
    for statement in split_statements(script):
        yield " ".join(without_comments(statement).split())


def list_grants() -> list[Traversable]:
    """Return the files of every version, in the order in which they run."""
    folder = files("outbox.migrations").joinpath("versions").iterdir()
    found = (file for file in folder if file.name.endswith(".grants.sql"))
    return sorted(found, key=lambda file: file.name)


@cache
def _scripts() -> str:
    return "".join(file.read_text(encoding="utf-8") for file in list_grants())
