"""Run an SQL file of the migrations, with the names of this installation filled in."""

import re
from enum import StrEnum
from importlib.resources import files

from alembic import context, op
from sqlalchemy import text

from outbox.administration.checks.foreign import LIST_FOREIGN_OBJECTS
from outbox.administration.names import Names
from outbox.migrations.statements import split_statements, without_comments


class Part(StrEnum):
    """Who runs a file of the printed SQL: the administrator's part runs first."""

    ADMINISTRATOR = "administrator"
    OWNER = "owner"


def run(file: str, **values: str) -> None:
    """Run the statements of a file of this package, or print them in offline mode.

    Each `{name}` of the values is replaced. If one part is printed, that is left out
    which the first words of the file say to be for the other: `Owner part` or
    `Administrator part`.
    """
    script = files("outbox.migrations").joinpath(file).read_text(encoding="utf-8")
    part = context.config.attributes.get("part")
    whose = script[3:].partition(" part")[0].lower()
    if part is not None and whose in set(Part) - {part}:
        return
    script = script.replace("{list_foreign_objects}", LIST_FOREIGN_OBJECTS)
    names = context.config.attributes.get("names", Names())
    for name, value in values.items():
        script = script.replace(f"{{{name}}}", value)
    for statement in split_statements(names.fill(script)):
        bare = without_comments(statement)
        # All of its part runs as the owner.
        if part != Part.OWNER or not bare.startswith(("SET LOCAL ROLE", "RESET ROLE")):
            # text() would read a colon before a word as a parameter, but not [:space:].
            op.execute(text(re.sub(r"(?<![:\w]):(?=\w+(?![:\w]))", r"\\:", statement)))
