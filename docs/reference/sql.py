"""Write the reference page of views, tables and functions, from the catalog."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Final

import psycopg

PAGE: Final = Path(__file__).parent / "sql.md"

_INTRODUCTION: Final = """\
# SQL

<!-- Written by `make reference` from the comments in the database. -->

What is there to read and to call. `\\d+ outbox.message_status` in psql shows the same
comments; [roles and privileges](../database.md#roles-and-privileges) says who may read
what.

"""
# Granted to a role: what only other views read is left out.
_RELATIONS: Final = """
SELECT CASE c.relkind WHEN 'v' THEN 'Views' ELSE 'Tables' END,
       n.nspname || '.' || c.relname, obj_description(c.oid, 'pg_class'),
       a.attname, format_type(a.atttypid, NULL), col_description(c.oid, a.attnum)
  FROM pg_class c
  JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
 WHERE n.nspname IN ('outbox', 'inbox') AND c.relkind IN ('r', 'p', 'v')
   AND NOT c.relispartition AND c.relname <> 'alembic_version'
   AND EXISTS (SELECT FROM outbox.promise p
                WHERE p.relation = c.oid::regclass::text AND p.fact LIKE 'right of %')
 ORDER BY c.relkind <> 'v', n.nspname <> 'outbox', c.relname, a.attnum
"""
# Those for people; the rest belongs to pillarbox's processes and to the upkeep.
_FOR_PEOPLE: Final = [
    *("add", "uuid7", "cancel", "move"),
    *("maintain", "set_interval", "accept_clock"),
]
_FUNCTIONS: Final = """
SELECT 'outbox.' || p.proname, pg_get_function_arguments(p.oid),
       pg_get_function_result(p.oid), obj_description(p.oid, 'pg_proc')
  FROM pg_proc p
 WHERE p.pronamespace = 'outbox'::regnamespace AND p.proname = ANY (%(names)s)
 ORDER BY array_position(%(names)s, p.proname::text), p.oid::regprocedure::text
"""


def page(connection: psycopg.Connection) -> str:
    """Return the whole page, with what the database of the connection has."""
    return _INTRODUCTION + "\n".join([*_relations(connection), *_functions(connection)])


def _relations(connection: psycopg.Connection) -> Iterator[str]:
    rows = connection.execute(_RELATIONS).fetchall()
    for kind, of_kind in groupby(rows, key=lambda row: row[0]):
        yield f"## {kind}\n"
        for (name, comment), columns in groupby(of_kind, key=lambda row: row[1:3]):
            yield f"### `{name}`\n\n{_sentence(comment)}\n"
            yield "| column | type | |\n|---|---|---|"
            for *_, column, type_, about in columns:
                yield f"| `{column}` | `{type_}` | {_text(about)} |".replace(
                    "|  |", "| |"
                )
            yield ""


def _functions(connection: psycopg.Connection) -> Iterator[str]:
    yield "## Functions\n"
    rows = connection.execute(_FUNCTIONS, {"names": _FOR_PEOPLE}).fetchall()
    for name, overloads in groupby(rows, key=lambda row: str(row[0])):
        yield f"### `{name}`\n"
        for _, arguments, result, comment in overloads:
            returns = f" → {result}" if result else ""
            yield f"{_sentence(comment)}\n"
            yield f"    {name}({arguments}){returns}\n"


def _sentence(comment: str) -> str:
    text = _text(comment)
    return f"{text[0].upper()}{text[1:]}."


def _text(comment: str | None) -> str:
    return (comment or "").replace("|", "\\|").replace("<", "\\<").replace("*", "\\*")
