"""Split the printed SQL into the parts of the administrator and of the owner."""

from enum import StrEnum
from typing import Final

from outbox.migrations.statements import split_statements, without_comments

_FOR_BOTH: Final = (
    "BEGIN",
    "COMMIT",
    "SET LOCAL search_path",
    "SET LOCAL lock_timeout",
    "SELECT pg_catalog.pg_advisory_xact_lock",
    "DO $version$",
    "DO $foreign$",
)
_OF_THE_OWNER: Final = (
    "CREATE TABLE outbox.alembic_version",
    "INSERT INTO outbox.alembic_version",
    "UPDATE outbox.alembic_version",
)


class Part(StrEnum):
    """Who runs a statement: the administrator's part runs first."""

    ADMINISTRATOR = "administrator"
    OWNER = "owner"


def part_of(script: str, part: Part, owner: str) -> str:
    """Return the statements of one part, in their order, as one transaction.

    The owner's are those between `SET LOCAL ROLE <owner>` and `RESET ROLE`, and those
    that record the version; the rest, except for what both need, is the
    administrator's.
    """
    become = f'SET LOCAL ROLE "{owner}"'
    chosen = []
    whose = Part.ADMINISTRATOR
    for statement in split_statements(script):
        bare = without_comments(statement)
        if bare == become:
            whose = Part.OWNER
        elif bare == "RESET ROLE":
            whose = Part.ADMINISTRATOR
        elif bare.startswith(_FOR_BOTH):
            chosen.append(bare)
            if bare == "BEGIN" and part is Part.OWNER:
                chosen.append(become)
        elif part is (Part.OWNER if bare.startswith(_OF_THE_OWNER) else whose):
            chosen.append(statement)
    return "".join(f"{statement};\n\n" for statement in chosen)
