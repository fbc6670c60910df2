"""Keep pillarbox's tables, and all partitions, out of your own Alembic autogenerate.

In the `run_migrations_online` of your env.py, with or without `include_schemas`:

    from outbox.administration.autogenerate import LeaveOut

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

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Final, TypeAlias

from sqlalchemy import Connection, text

from outbox.postgres.sql_files import load

IncludeName: TypeAlias = Callable[[str | None, str, Mapping[str, Any]], bool]
IncludeObject: TypeAlias = Callable[[Any, str | None, str, bool, Any], bool]

_OUR_SCHEMAS: Final = frozenset({"outbox", "inbox"})


class LeaveOut:
    """The filters for one run of Alembic.

    They leave out the schemas `outbox` and `inbox`, partitions of any table, the tables
    of extensions and pg_partman's templates.

    Args:
        connection: Alembic's connection; first queried when Alembic calls a filter, so
            that no transaction begins before Alembic's.
        include_name, include_object: your own filters, called for everything else.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        include_name: IncludeName | None = None,
        include_object: IncludeObject | None = None,
    ) -> None:
        self._connection = connection
        self._include_name = include_name
        self._include_object = include_object

    def include_name(
        self, name: str | None, type_: str, parent_names: Mapping[str, Any]
    ) -> bool:
        """Return whether to compare the database object with this name."""
        if type_ == "schema" and name in _OUR_SCHEMAS:
            return False
        if type_ == "table" and self._is_left_out(
            parent_names.get("schema_name"), name
        ):
            return False
        return self._include_name is None or self._include_name(
            name, type_, parent_names
        )

    def include_object(
        self,
        object_: Any,
        name: str | None,
        type_: str,
        reflected: bool,
        compare_to: Any,
    ) -> bool:
        """Return whether to compare an object of the models or of the database."""
        if type_ == "table" and self._is_left_out(object_.schema, name):
            return False
        return self._include_object is None or self._include_object(
            object_, name, type_, reflected, compare_to
        )

    def _is_left_out(self, schema: str | None, table: str | None) -> bool:
        if schema in _OUR_SCHEMAS:
            return True
        return (schema or self._default_schema, table) in self._tables

    @property
    def _default_schema(self) -> str | None:
        return self._connection.dialect.default_schema_name

    @cached_property
    def _tables(self) -> frozenset[tuple[str | None, str | None]]:
        query = text(load("outbox", "list_tables_to_leave_out"))
        return frozenset((s, t) for s, t in self._connection.execute(query))
