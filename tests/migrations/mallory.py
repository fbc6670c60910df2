"""Traps for unqualified names, made by a role that may create objects in public.

Even with the catalog first in the search path, as it usually is, PostgreSQL calls
another role's routine or operator if it matches the arguments better: where the
catalog's takes a different string type, any type, or any number of arguments.
"""

from typing import Final

# Routines that pillarbox, SQLAlchemy and psycopg call with such arguments.
_ROUTINES: Final = (
    *("format(text, text)", "format(text, text, text)", "format(text, name, name)"),
    *("format(text, text, int)", "format(text, text, interval)"),
    *("format(text, name)", "format(text, regclass)", "format(text, interval)"),
    *("format(text, regclass, text)", "format(text, text, text, text)"),
    *("quote_ident(name)", "quote_literal(name)", "split_part(name, text, int)"),
    *("left(name, int)", "starts_with(name, text)", "length(name)"),
    *("concat_ws(text, pg_snapshot, xid8, text)", "string_agg(name, text)"),
    *("array_agg(timestamptz)", "unnest(text[])"),
    *("has_schema_privilege(text, oid, text)", "pg_has_role(text, oid, text)"),
    *("has_function_privilege(text, regprocedure, text)", "to_regclass(name)"),
    *("pg_total_relation_size(oid)", "pg_get_userbyid(regrole)", "bool_and(name)"),
    *("date_trunc(text, timestamptz, name)", "generate_series(int4, numeric)"),
    *("set_config(text, name, boolean)", "pg_terminate_backend(int)"),
    *("regexp_match(name, text)", "array_to_string(name[], text)", "pg_sleep(numeric)"),
)
_OPERATORS: Final = (
    *(("=", "oid", "regtype"), ("=", "oid", "regclass"), ("=", "regclass", "oid")),
    *(("=", "name", "varchar"), ("=", "varchar", "name"), ("<>", "name", "varchar")),
    *(("=", "int4", "numeric"), ("+", "numeric", "float8"), ("*", "int4", "numeric")),
    *(("||", "text", "name"), ("||", "name", "text"), ("||", "text", "regclass")),
    *(("||", "name", "name"), ("~~", "name", "varchar"), ("~", "name", "varchar")),
    *(("+", "timestamptz", "text"), ("-", "timestamptz", "text")),
    *(("=", "name", "regrole"), ("<>", "regclass", "oid"), ("<", "int8", "numeric")),
)


def traps(role: str) -> str:
    """Return SQL that makes traps in public, which make `role` a superuser."""
    body = (
        "RETURNS {} LANGUAGE plpgsql AS"
        f" $f$BEGIN ALTER ROLE {role} SUPERUSER; RETURN NULL; END$f$"
    )
    made = [
        f"CREATE FUNCTION public.{routine} {body.format('text')}"
        for routine in _ROUTINES
    ]
    for number, (name, left, right) in enumerate(_OPERATORS):
        result = "text" if name == "||" else "boolean"
        bait = f"public.bait_{number}"
        made += [
            f"CREATE FUNCTION {bait}({left}, {right}) {body.format(result)}",
            f"CREATE OPERATOR public.{name} (LEFTARG = {left}, RIGHTARG = {right},"
            f" FUNCTION = {bait})",
        ]
    return f"SET SESSION AUTHORIZATION {role}; {'; '.join(made)}"
