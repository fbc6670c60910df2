"""Our own grants: read from the files that make them, compared with what roles have."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

from outbox.administration.check import Names
from outbox.administration.connection import AdministrationConnection
from outbox.migrations.statements import split_statements, without_comments
from outbox.postgres.sql_files import load

_KINDS: Final = "SCHEMA|SEQUENCE|FUNCTION|PROCEDURE"
_GRANT: Final = re.compile(
    rf"GRANT\s+(.+?)\s+ON\s+(?:({_KINDS})\s+)?(?!ALL\s)(.+?)\s+TO\s+(.+)", re.DOTALL
)
_REVOKE: Final = re.compile(
    rf"REVOKE\s+ALL\s+ON\s+({_KINDS})\s+(.+?)\s+FROM\s+PUBLIC", re.DOTALL
)
# Between commas that are in no parentheses.
_ITEM: Final = re.compile(r"[^\s,][^,(]*(?:\([^)]*\))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Right:
    role: str
    kind: str
    name: str
    privilege: str
    columns: tuple[str, ...]

    def grant(self, names: Names) -> str:
        columns = f" ({', '.join(self.columns)})" if self.columns else ""
        kind = f"{self.kind} " if self.kind else ""
        return (
            f"GRANT {self.privilege}{columns} ON {kind}{names.fill(self.name)}"
            f' TO "{names.role(self.role)}";'
        )


def list_lost_rights(
    connection: AdministrationConnection, names: Names
) -> Iterator[tuple[str, str, str]]:
    """Give roles that lack what the migrations gave, of what, and the GRANT for it."""
    asked = [
        (right, column)
        for right in _read_files()[0]
        if names.partman is not None or "{partman}" not in right.name
        for column in (right.columns or (None,))
    ]
    lost = connection.execute(
        load("outbox", "list_lost_rights"),
        {
            "roles": [names.role(right.role) for right, _ in asked],
            "kinds": [right.kind for right, _ in asked],
            "objects": [names.fill(right.name) for right, _ in asked],
            "privileges": [right.privilege for right, _ in asked],
            "columns": [column for _, column in asked],
        },
    )
    for (number,) in lost:
        right = asked[number - 1][0]
        yield names.role(right.role), names.fill(right.name), right.grant(names)


def list_open_routines(
    connection: AdministrationConnection,
) -> Iterator[tuple[str, str]]:
    """Give routines that anybody may run, and none but some should, with the REVOKE."""
    _, closed = _read_files()
    for (routine,) in connection.execute(
        load("outbox", "list_open_routines"), {"routines": list(closed)}
    ):
        yield routine, f"REVOKE ALL ON {closed[routine]} {routine} FROM PUBLIC;"


@cache
def _read_files() -> tuple[tuple[_Right, ...], dict[str, str]]:
    """Give every right, and every routine that PUBLIC may not run, with its kind."""
    folder = files("outbox.migrations")
    versions = folder.joinpath("versions").iterdir()
    ours = sorted((f for f in versions if f.name.endswith(".grants.sql")), key=str)
    rights: list[_Right] = []
    closed: dict[str, str] = {}
    for file in (*ours, folder.joinpath("grants_on_partman.sql")):
        for statement in split_statements(file.read_text(encoding="utf-8")):
            bare = without_comments(statement)
            if granted := _GRANT.fullmatch(bare):
                rights += _rights_of(*granted.groups(default=""))
            elif revoked := _REVOKE.fullmatch(bare):
                closed |= dict.fromkeys(_ITEM.findall(revoked[2]), revoked[1])
    return tuple(rights), closed


def _rights_of(
    privileges: str, kind: str, objects: str, roles: str
) -> Iterator[_Right]:
    for role in re.findall(r"\{(\w+)\}", roles):
        if role == "owner":  # asked for elsewhere, with all that pg_partman has
            continue
        for name in _ITEM.findall(objects):
            for item in _ITEM.findall(privileges):
                privilege, _, columns = item.partition("(")
                yield _Right(
                    role=role,
                    kind=kind,
                    name=name,
                    privilege=privilege.strip(),
                    columns=tuple(re.findall(r"\w+", columns)),
                )
