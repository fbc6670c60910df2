"""Keep pillarbox's tables, and all partitions, out of your own Alembic autogenerate.

In the `run_migrations_online` of your env.py, with or without `include_schemas`:

    from pillarbox import LeaveOut

    leave_out = LeaveOut(connection)
    context.configure(
        connection=connection,
        target_metadata=target_metadata,
        include_name=leave_out.include_name,
        include_object=leave_out.include_object,
    )

In an async env.py, do the same in the function that you pass to `run_sync`. Offline,
Alembic compares nothing, so there is nothing to leave out. pillarbox's migrations have
their own version table (`outbox.alembic_version`), so your history never branches.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final

from sqlalchemy import Connection, text

from pillarbox.outbox.postgres.sql_files import load

_OUR_SCHEMAS: Final = frozenset({"outbox", "inbox"})


class LeaveOut:
    """The filters for one run of Alembic.

    They leave out the schemas `outbox` and `inbox`, partitions of any table, the tables
    of extensions and pg_partman's templates.

    Args:
        connection: Alembic's connection; first queried when Alembic calls a filter, so
            that no transaction begins before Alembic's.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def include_name(
        self, name: str | None, type_: str, parent_names: Mapping[Any, Any]
    ) -> bool:
        """Return whether to compare the database object with this name."""
        if type_ == "schema":
            return name not in _OUR_SCHEMAS
        schema = parent_names.get("schema_name")
        return type_ != "table" or not self._is_left_out(schema, name)

    def include_object(
        self,
        object_: Any,
        name: str | None,
        type_: str,
        _reflected: bool,
        _compare_to: Any,
    ) -> bool:
        """Return whether to compare an object of the models or of the database."""
        return type_ != "table" or not self._is_left_out(object_.schema, name)

    def _is_left_out(self, schema: str | None, table: str | None) -> bool:
        if schema in _OUR_SCHEMAS:
            return True
        default = self._connection.dialect.default_schema_name
        return (schema or default, table) in self._tables

    @cached_property
    def _tables(self) -> frozenset[tuple[str | None, str | None]]:
        query = text(load("outbox", "list_tables_to_leave_out"))
        return frozenset((s, t) for s, t in self._connection.execute(query))
