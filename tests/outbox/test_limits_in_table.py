"""The table's own limits: nobody can insert a row that no relay could load."""

import psycopg
import pytest

from pillarbox.outbox import limits
from tests.fixtures.sessions import execute

INDEXED, TENANT, CONTENT_TYPE, HEADERS = 2048, 1024, 1020, 256 * 1024
SQL = {
    "id": "outbox.uuid7()",
    "lane": "16",
    "topic": "'t'",
    "content_type": "'c'",
    "payload": "''",
}
TOO_MUCH = {
    "no topic": ("topic", "''", "topic_size"),
    "topic": ("topic", f"repeat('x', {INDEXED + 1})", "topic_size"),
    "no key": ("key", "''", "key_size"),
    "key": ("key", f"repeat('x', {INDEXED + 1})", "key_size"),
    "tenant": ("tenant", f"repeat('x', {TENANT + 1})", "tenant_size"),
    "content_type": (
        "content_type",
        f"repeat('x', {CONTENT_TYPE + 1})",
        "content_type_size",
    ),
    "headers": (
        "headers",
        f"jsonb_build_object('h', repeat('x', {HEADERS + 100}))",
        "headers_size",
    ),
    "many headers": (
        "headers",
        "(SELECT jsonb_object_agg(n, '') FROM generate_series(1, 30000) n)",
        "headers_size",
    ),
    "headers with a number": (
        "headers",
        """'{"a": "b", "h": 1e131000}'""",
        "headers_are_strings",
    ),
    "headers with strings in a list": (
        "headers",
        """'{"h": ["a"]}'""",
        "headers_are_strings",
    ),
    "headers in a list": ("headers", """'[{"h": "a"}]'""", "headers_are_strings"),
    "a number as headers": ("headers", "'1e131000'", "headers_are_strings"),
    "payload": (
        "payload",
        f"convert_to(repeat('x', {limits.MAX_PAYLOAD_BYTES + 1}), 'UTF8')",
        "payload_size",
    ),
    "schema_version": ("schema_version", "0", "schema_version_positive"),
}
FITS = {
    "topic": f"repeat('x', {INDEXED})",
    "key": f"repeat('x', {INDEXED})",
    "tenant": f"repeat('x', {TENANT})",
    "content_type": f"repeat('x', {CONTENT_TYPE})",
    "headers": f"jsonb_build_object('h', repeat('x', {HEADERS - 9}))",
    "payload": f"convert_to(repeat('x', {2**20}), 'UTF8')",
}


def insert(url: str, **values: str) -> None:
    """Insert a row with these columns in the role of the application."""
    row = SQL | values
    execute(
        f"{url}?options=-crole%3Dpillarbox_application",
        f"INSERT INTO outbox.message ({', '.join(row)})"
        f" VALUES ({', '.join(row.values())})",
    )


def test_the_table_accepts_values_at_the_limits_and_refuses_values_above(
    database_url: str,
) -> None:
    insert(database_url, **FITS)
    for what, (column, value, constraint) in TOO_MUCH.items():
        with pytest.raises(psycopg.errors.CheckViolation) as refused:
            insert(database_url, **{column: value})
        assert (what, refused.value.diag.constraint_name) == (what, constraint)


def test_compressed_headers_are_measured_uncompressed(
    database_url: str,
) -> None:
    execute(
        database_url,
        "CREATE TABLE public.small (headers jsonb);"
        "INSERT INTO public.small"
        " SELECT jsonb_build_object('h', repeat('x', 20000000))",
    )
    ((size,),) = execute(database_url, "SELECT pg_column_size(headers) FROM small")
    assert size < HEADERS

    with pytest.raises(psycopg.errors.CheckViolation, match="headers_size"):
        execute(
            database_url,
            f"INSERT INTO outbox.message ({', '.join(SQL)}, headers)"
            f" SELECT {', '.join(SQL.values())}, headers FROM public.small",
        )


NAMES = sorted({constraint for _, _, constraint in TOO_MUCH.values()})


def test_every_limit_holds_in_every_partition_and_for_every_row(
    database_url: str,
) -> None:
    constraints = execute(
        database_url,
        "SELECT DISTINCT conname, convalidated FROM pg_constraint"
        " WHERE contype = 'c' AND conrelid::regclass::text LIKE 'outbox.message%'"
        " AND (conname LIKE '%size'"
        " OR conname IN ('headers_are_strings', 'schema_version_positive'))"
        " ORDER BY 1",
    )
    assert constraints == [(name, True) for name in NAMES]
