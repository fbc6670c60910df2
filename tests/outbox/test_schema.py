"""The table definition for SQLAlchemy matches the migrated table."""

import pytest
from sqlalchemy import MetaData, Table, create_engine
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import SAWarning

from pillarbox.outbox.postgres.connection import sqlalchemy_url
from pillarbox.outbox.schema import message_table

PUBLIC = postgresql.dialect()  # type: ignore[no-untyped-call]


def columns(table: Table) -> dict[str, tuple[str, bool, bool]]:
    return {
        column.name: (
            column.type.compile(PUBLIC),
            bool(column.nullable),
            column.server_default is not None,
        )
        for column in table.columns
        if column.name != "xid"
    }


def test_the_description_agrees_with_the_migrated_table(database_url: str) -> None:
    engine = create_engine(sqlalchemy_url(database_url))
    # It has no type for transaction ids.
    with pytest.warns(SAWarning, match="'xid8' of column 'xid'"):
        migrated = Table("message", MetaData(), schema="outbox", autoload_with=engine)
    engine.dispose()

    assert columns(message_table) == columns(migrated)
    assert message_table.primary_key.columns.keys() == (
        migrated.primary_key.columns.keys()
    )
    assert (
        message_table.dialect_options["postgresql"]["partition_by"]
        == "RANGE (created_at)"
    )
