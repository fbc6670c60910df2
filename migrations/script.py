"""Run an SQL file of the migrations, with the names of this installation filled in."""

import re
from importlib.resources import files

from alembic import context, op
from sqlalchemy import text

from outbox.administration.checks.foreign import LIST_FOREIGN_OBJECTS
from outbox.administration.names import Names
from outbox.migrations.grants import revoke_all
from outbox.migrations.statements import split_statements


def run(file: str, **values: str) -> None:
    """Run the statements of a file of this package, or print them in offline mode.

    Each `{name}` of the values is replaced by a string literal; values have no quotes.
    """
    script = files("outbox.migrations").joinpath(file).read_text(encoding="utf-8")
    if "{revoke_all}" in script:
        script = script.replace("{revoke_all}", revoke_all(script))
    script = script.replace("{list_foreign_objects}", LIST_FOREIGN_OBJECTS)
    names = context.config.attributes.get("names", Names())
    for name, value in values.items():
        script = script.replace(f"{{{name}}}", f"'{value}'")
    for statement in split_statements(names.fill(script)):
        # text() would read a colon before a word as a parameter, but not [:space:].
        op.execute(text(re.sub(r"(?<![:\w]):(?=\w+(?![:\w]))", r"\\:", statement)))
