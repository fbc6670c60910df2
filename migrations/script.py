"""Run an SQL file of the migrations, with the names of this installation filled in."""

import re
from enum import StrEnum
from importlib.resources import files

from alembic import context
from sqlalchemy import text

from outbox.administration.checks.foreign import LIST_FOREIGN_OBJECTS


class Part(StrEnum):
    """Who runs a file of the printed SQL: the administrator's part runs first."""

    ADMINISTRATOR = "administrator"
    OWNER = "owner"


def run(file: str, **values: str) -> None:
    """Run a file of this package as one query, or print it in offline mode.

    Each `{name}` of the values is replaced. If one part is printed, that is left out
    which the first words of the file say to be for the other: `Owner part` or
    `Administrator part`.
    """
    script = files("outbox.migrations").joinpath(file).read_text(encoding="utf-8")
    part = context.config.attributes.get("part")
    whose = script[3:].partition(" part")[0].lower()
    if part is not None and whose in set(Part) - {part}:
        return
    if part == Part.OWNER:
        # All of its part runs as the owner.
        script = re.sub(r"(?m)^(SET LOCAL|RESET) ROLE\b.*\n", "", script)
    script = script.replace("{list_foreign_objects}", LIST_FOREIGN_OBJECTS)
    for name, value in values.items():
        script = script.replace(f"{{{name}}}", value)
    script = context.config.attributes["names"].fill(script).rstrip().rstrip(";")
    # text() would read a colon before a word as a parameter, but not [:space:].
    context.execute(text(re.sub(r"(?<![:\w]):(?=\w+(?![:\w]))", r"\\:", script)))
