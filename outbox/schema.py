"""The outbox's table as SQLAlchemy sees it, and the INSERT into it."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import (
    ARRAY,
    BigInteger,
    BindParameter,
    Column,
    Connection,
    DateTime,
    Insert,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    TwoPhaseTransaction,
    bindparam,
    cast,
    func,
    insert,
    literal_column,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB, UUID
from typing_extensions import override

from pillarbox.outbox.array_literal import (
    bytes_array,
    moment_array,
    plain_array,
    text_array,
)
from pillarbox.outbox.lane import lane_of
from pillarbox.outbox.message import Message
from pillarbox.outbox.session import refuse_autocommit

_encode = json.JSONEncoder(ensure_ascii=False).encode

# A transaction that sends a NOTIFY can't be prepared: the insert triggers look at this.
_IS_TWO_PHASE: Final = select(func.set_config("pillarbox.two_phase", "on", True))

_LITERAL: Final[dict[str, Callable[[list[Any]], str]]] = {
    "id": plain_array,
    "lane": plain_array,
    "schema_version": plain_array,
    "available_at": moment_array,
    "payload": bytes_array,
}


_NULLABLE: Final = ("available_at", "key", "tenant")
"""Of these, an empty string in an array is null."""


class MessageInsert(Insert):
    """An INSERT of messages that fails where a rollback would keep its rows.

    The unit of work executes it with lists of messages, each in place of a payload.
    """

    inherit_cache = True

    @override
    def _execute_on_connection(
        self, connection: Connection, distilled_params: Any, execution_options: Any
    ) -> Any:
        refuse_autocommit(connection, "the messages")
        if isinstance(connection.get_transaction(), TwoPhaseTransaction):
            connection.execute(_IS_TWO_PHASE)
        given = [row.get("payload") for row in distilled_params or ()]
        if not given or not isinstance(given[0], list):
            return super()._execute_on_connection(
                connection, distilled_params, execution_options
            )
        rows = [_row(message) for messages in given for message in messages]
        if len(rows) == 1:
            return connection.execute(_INSERT_ONE, rows[0])
        return connection.execute(_INSERT_MANY, _arrays(rows))


class _MessageTable(Table):
    """A table of messages, into which the unit of work inserts by one statement."""

    inherit_cache = True

    @override
    def insert(self) -> MessageInsert:
        return MessageInsert(self)


metadata = MetaData(schema="outbox")

message_table = _MessageTable(
    "message",
    metadata,
    Column("id", UUID(as_uuid=True), primary_key=True),
    Column(
        "created_at",
        DateTime(timezone=True),
        primary_key=True,
        server_default=text("clock_timestamp()"),
    ),
    Column(
        "seq",
        BigInteger,
        nullable=False,
        server_default=text(
            "CASE WHEN pg_current_xact_id() IS NOT NULL"
            " THEN nextval('outbox.message_seq'::regclass) END"
        ),
    ),
    Column("available_at", DateTime(timezone=True)),
    Column("lane", SmallInteger, nullable=False),
    Column("schema_version", Integer, nullable=False, server_default=text("1")),
    Column("topic", Text, nullable=False),
    Column("key", Text),
    Column("tenant", Text),
    Column("content_type", Text, nullable=False),
    Column("headers", JSONB, nullable=False, server_default=text("'{}'::jsonb")),
    Column("payload", LargeBinary, nullable=False),
    postgresql_partition_by="RANGE (created_at)",
)
_COLUMNS: Final[dict[str, Any]] = {
    it.name: Text() if it.name == "headers" else it.type
    for it in message_table.columns
    if it.name not in {"created_at", "seq"}  # they have defaults
}


def insert_of(messages: Sequence[Message]) -> MessageInsert:
    """Build the INSERT of messages; its text doesn't depend on their number."""
    return _from_arrays(
        {
            name: bindparam(None, literal, Text(), unique=True)
            for name, literal in arrays_of(messages).items()
        },
    )


def insert_many() -> MessageInsert:
    """Return the INSERT of any number of messages, whose parameters are `arrays_of`."""
    return _INSERT_MANY


def arrays_of(messages: Sequence[Message]) -> dict[str, str]:
    """Return the columns of messages as array literals, by name."""
    return _arrays([_row(message) for message in messages])


def _row(message: Message) -> dict[str, Any]:
    return {
        "id": message.id,
        "lane": lane_of(message.key, message.id, message.priority),
        "schema_version": message.schema_version,
        "available_at": message.available_at,
        "topic": message.topic,
        "key": message.key,
        "tenant": message.tenant,
        "content_type": message.content_type,
        "headers": _encode(message.headers) if message.headers else "{}",
        "payload": message.payload,
    }


def _arrays(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    return {
        name: _LITERAL.get(name, text_array)([row[name] for row in rows])
        for name in _COLUMNS
    }


def _from_arrays(arrays: Mapping[str, BindParameter[Any]]) -> MessageInsert:
    added = (
        func.unnest(
            *(
                cast(
                    cast(arrays[name], Text()),
                    ARRAY(Text() if name in _NULLABLE else type_),
                )
                for name, type_ in _COLUMNS.items()
            )
        )
        .table_valued(*_COLUMNS, with_ordinality="position", name="added")
        .render_derived()
    )
    source = select(
        *(
            cast(added.c.headers, JSONB)
            if name == "headers"
            else cast(func.nullif(added.c[name], literal_column("''")), type_)
            if name in _NULLABLE
            else added.c[name]
            for name, type_ in _COLUMNS.items()
        )
    ).order_by(added.c.position)  # seq is drawn in this order
    return MessageInsert(message_table).from_select(
        list(_COLUMNS), source, include_defaults=False
    )


# Built once: building it for each flush takes longer than running it (0.7 ms of a
# transaction of 1.9 ms). For one row, VALUES takes the server a third of the time of
# unnest().
_INSERT_MANY: Final = _from_arrays(
    {name: bindparam(name, type_=Text()) for name in _COLUMNS}
)
_INSERT_ONE: Final = (
    insert(message_table)
    .values(
        {
            name: cast(bindparam(name, type_=Text()), JSONB)
            if name == "headers"
            else bindparam(name, type_=type_)
            for name, type_ in _COLUMNS.items()
        }
    )
    .inline()  # no RETURNING, for which the application's role lacks the privilege
)
