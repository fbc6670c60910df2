"""Run an SQL file of the migrations, with the names of this installation filled in."""

import re
from enum import StrEnum
from importlib.resources import files
from typing import Final

from alembic import context
from sqlalchemy import text

from pillarbox.outbox.administration.checks.foreign import LIST_FOREIGN_OBJECTS
from pillarbox.outbox.migrations.statements import split_statements
from pillarbox.outbox.postgres.superuser import LIST_LESSER_OWNERS

_SETTINGS: Final = {
    # Functions must not call other roles' objects, whoever calls them.
    "pinned": "SET search_path = pg_catalog, pg_temp",
    # Moments in a text are read again, by PostgreSQL and by people.
    "utc": "SET timezone = 'UTC' SET datestyle = 'ISO, MDY'"
    " SET intervalstyle = 'postgres'",
}

_EACH: Final = """\
DO $each$
DECLARE
    v_statement text;
BEGIN
    FOR v_statement IN
{query}
    LOOP
        EXECUTE v_statement;
    END LOOP;
END
$each$"""


class Part(StrEnum):
    """Who runs a part of the printed SQL; the administrator's runs first."""

    ADMINISTRATOR = "administrator"
    OWNER = "owner"


def run(file: str, **values: str) -> None:
    """Run the statements of a file of this package, or print them in offline mode.

    Each `{name}` of the values is replaced, and `{pinned}` and `{utc}` by settings of a
    function. `EXECUTE EACH` before a query executes the statements that it returns.
    The first words of the file say whose it is: `Administrator part`, or `Owner part`,
    which runs as the owner. If one part is printed, the other is left out.
    """
    script = (
        files("pillarbox.outbox.migrations").joinpath(file).read_text(encoding="utf-8")
    )
    part = context.config.attributes.get("part")
    whose = script[3:].partition(" part")[0].lower()
    if part is not None and whose in set(Part) - {part}:
        return
    script = script.replace("{list_foreign_objects}", LIST_FOREIGN_OBJECTS)
    script = script.replace("{list_lesser_owners}", LIST_LESSER_OWNERS)
    names = context.config.attributes["names"]
    for name, value in (_SETTINGS | values).items():
        script = script.replace(f"{{{name}}}", value)
    statements = list(split_statements(names.fill(script)))
    # If the owner's part alone is printed, all of it runs as the owner.
    if whose == Part.OWNER and part is None:
        owner = names.fill("SET LOCAL ROLE {owner}")
        statements = [owner, *statements, "RESET ROLE"]
    for statement in statements:
        comments, is_each, query = statement.partition("EXECUTE EACH\n")
        if is_each:
            statement = comments + _EACH.replace("{query}", query)
        # text() would read a colon before a word as a parameter, but not [:space:].
        context.execute(text(re.sub(r"(?<![:\w]):(?=\w+(?![:\w]))", r"\\:", statement)))
