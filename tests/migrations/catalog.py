"""The objects of pillarbox in a database, read from the catalog."""

from typing import Any, TypeAlias

import psycopg
from psycopg import sql

Snapshot: TypeAlias = dict[str, list[tuple[Any, ...]]]

_SCHEMAS = "n.nspname IN ('outbox', 'inbox')"
_QUERIES = {
    "schemas": f"""
        SELECT n.nspname, n.nspowner::regrole::text, n.nspacl::text,
               obj_description(n.oid, 'pg_namespace')
          FROM pg_namespace n WHERE {_SCHEMAS}
    """,
    "relations": f"""
        SELECT n.nspname, c.relname, c.relkind, c.relowner::regrole::text,
               c.relacl::text, c.reloptions::text, obj_description(c.oid, 'pg_class'),
               pg_get_expr(c.relpartbound, c.oid)
          FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE {_SCHEMAS} AND c.relname NOT LIKE 'alembic%%'
    """,
    "columns": f"""
        SELECT n.nspname, c.relname, a.attnum, a.attname, a.atttypid::regtype::text,
               a.attnotnull, a.attacl::text, pg_get_expr(d.adbin, d.adrelid),
               col_description(c.oid, a.attnum)
          FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
          JOIN pg_namespace n ON n.oid = c.relnamespace
          LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
         WHERE {_SCHEMAS} AND a.attnum > 0 AND c.relname NOT LIKE 'alembic%%'
    """,
    "indexes": """
        SELECT schemaname, indexname, indexdef FROM pg_indexes
         WHERE schemaname IN ('outbox', 'inbox') AND tablename NOT LIKE 'alembic%%'
    """,
    "constraints": f"""
        SELECT n.nspname, c.conname, c.conrelid::regclass::text,
               pg_get_constraintdef(c.oid)
          FROM pg_constraint c JOIN pg_namespace n ON n.oid = c.connamespace
         WHERE {_SCHEMAS} AND c.conname NOT LIKE 'alembic%%'
    """,
    "routines": f"""
        SELECT n.nspname, p.oid::regprocedure::text, pg_get_functiondef(p.oid),
               p.proowner::regrole::text, p.proacl::text,
               obj_description(p.oid, 'pg_proc')
          FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE {_SCHEMAS}
    """,
    "triggers": f"""
        SELECT t.tgrelid::regclass::text, t.tgname, pg_get_triggerdef(t.oid)
          FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
          JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE {_SCHEMAS} AND NOT t.tgisinternal
    """,
    "views": """
        SELECT schemaname, viewname, definition, viewowner FROM pg_views
         WHERE schemaname IN ('outbox', 'inbox')
    """,
}
_IF_THERE = {
    "outbox.partition_policy": "SELECT * FROM outbox.partition_policy",
    "outbox.alembic_version": "SELECT * FROM outbox.alembic_version",
    "partman.part_config": """
        SELECT parent_table, control, partition_type, partition_interval, premake,
               retention, template_table, infinite_time_partitions, inherit_privileges,
               ignore_default_data, automatic_maintenance
          FROM partman.part_config
    """,
    "cron.job": "SELECT jobname, schedule, command, database, username FROM cron.job",
}


def snapshot(url: str) -> Snapshot:
    """Return everything about pillarbox's objects, except their oids."""
    with psycopg.connect(url, autocommit=True) as connection:
        found = {
            name: sorted(connection.execute(query).fetchall(), key=repr)
            for name, query in _QUERIES.items()
        }
        for table, query in _IF_THERE.items():
            row = connection.execute("SELECT to_regclass(%s)", (table,)).fetchone()
            if row != (None,):
                found[table] = sorted(connection.execute(query).fetchall(), key=repr)
    return found


def drop_roles_of_jobs(url: str, prefix: str) -> None:
    """Drop the roles that a removal leaves where pg_cron runs."""
    left = "SELECT rolname FROM pg_roles WHERE starts_with(rolname, %s) ORDER BY 1"
    with psycopg.connect(url, autocommit=True) as connection:
        roles = connection.execute(left, (f"{prefix}_",)).fetchall()
        assert roles == [(f"{prefix}_detacher",), (f"{prefix}_maintainer",)]
        connection.execute(
            sql.SQL("DROP ROLE {}, {}").format(*(sql.Identifier(r) for (r,) in roles))
        )


def is_empty(found: Snapshot) -> bool:
    return not any(found.values())
