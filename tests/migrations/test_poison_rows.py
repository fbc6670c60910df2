"""Rows that a role may insert, with values that no other role could go on with."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import errors

from pillarbox import Message
from tests.fixtures.postgres import migrate_for_a_week
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import insert, running, unsettled
from tests.fixtures.sessions import execute

POSITION = (
    "INSERT INTO outbox.position (created_at, ends_at, number, up_to, messages, lane,"
    " reader, snapshot, next_xid) SELECT starts_at, ends_at, {number}, {up_to},"
    " 0, 16, 'main', '{snapshot}', '{next_xid}'"
    " FROM outbox.partitions('outbox.message') WHERE ends_at > now() LIMIT 1"
)
LAST = "floor(extract(epoch FROM clock_timestamp()) * 1000000) - 1"
USUAL: dict[str, object] = {"number": 1, "up_to": 1, "snapshot": "1:1:", "next_xid": 3}
LARGEST = 2**63 - 1
DEFERRAL = (
    "INSERT INTO outbox.deferral (created_at, id, due_at, cause, lane, {column})"
    " VALUES (now(), gen_random_uuid(), now(), 'refused', 1, {value})"
)
LONG = "repeat('x', 30000000)"


def row(table: str, usual: str, **values: str) -> str:
    """Return the INSERT of one row: `usual` columns, of which `values` replace some."""
    columns = dict(pair.split("=") for pair in usual.split(", ")) | values
    return (
        f"INSERT INTO {table} ({', '.join(columns)}) VALUES"
        f" ({', '.join(columns.values())})"
    )


DEAD_LETTER = (
    "origin='o', message_id='m', topic='t', attempts=1, schema_version=1,"
    " content_type='t', headers='{}', payload='', error_reason='no'"
)
TEXTS = (
    *("origin", "message_id", "topic", "key", "tenant", "content_type"),
    *("error_reason", "error_stacktrace"),
)
JOB = (
    "message_id='01981f2e-0000-7000-8000-000000000000',"
    " message_at=inbox.moment_of('01981f2e-0000-7000-8000-000000000000'), consumer='c'"
)
POISON = {
    "relay": [
        POSITION.format(**USUAL)
        .replace("(created_at", "(settled_at, created_at")
        .replace("starts_at", "'9999-01-01', starts_at", 1),
        POSITION.format(**{**USUAL, "number": 2**62}),
        *(row("outbox.dead_letter", DEAD_LETTER, **{text: LONG}) for text in TEXTS),
        DEFERRAL.format(column="seq, key", value=f"1, {LONG}"),
        *(
            POSITION.format(**{**USUAL, **change})
            for change in (
                {"number": LARGEST},
                {"up_to": LARGEST},
                {"next_xid": 2**64 - 1},
                {"snapshot": f"1:{2**63 + 3}:"},
                {"snapshot": f"1:300000:{','.join(map(str, range(2, 200_000)))}"},
            )
        ),
        DEFERRAL.format(column="seq, entry", value=f"1, {LARGEST}"),
        DEFERRAL.replace("now(), 'refused'", "'9999-01-01', 'refused'").format(
            column="seq", value=1
        ),
        DEFERRAL.format(column="seq", value=LARGEST),
        DEFERRAL.format(column="seq", value=-LARGEST - 1),
        DEFERRAL.format(column="seq, reason", value="1, repeat('x', 30000000)"),
        "UPDATE outbox.reader SET broker = repeat('x', 30000000)",
        "INSERT INTO outbox.subscription (reader, topic, since, since_seq)"
        f" VALUES ('main', 't', '1:1:', {LARGEST})",
        "INSERT INTO outbox.subscription (reader, topic, since, since_seq)"
        f" VALUES ('main', 't', '1:{2**63 + 3}:', 1)",
    ],
    "consumer": [
        *(row("inbox.dead_letter", DEAD_LETTER, **{text: LONG}) for text in TEXTS),
        *(
            row("inbox.job", JOB, **{text: LONG})
            for text in ("topic", "key", "tenant", "worker", "reason")
        ),
        *(
            row("inbox.suspect", f"{JOB}, starts=1", **{text: LONG})
            for text in ("error_reason", "error_stacktrace")
        ),
    ],
    "application": [
        f"INSERT INTO outbox.message (id, lane, topic, content_type, payload,"
        f" available_at) VALUES (outbox.uuid7(), 1, 't', 't', '', '{moment}')"
        for moment in ("9999-01-01", "2100-01-01")
    ],
}


@contextmanager
def role_of(url: str, role: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"SET SESSION AUTHORIZATION pillarbox_{role}")
        yield connection


@pytest.mark.parametrize("role", POISON)
def test_no_role_can_insert_a_row_that_poisons_others(
    role: str, database_url: str
) -> None:
    with role_of(database_url, role) as connection:
        for statement in POISON[role]:
            with pytest.raises((errors.CheckViolation, errors.InsufficientPrivilege)):
                connection.execute(statement)


@pytest.mark.parametrize(("side", "role"), [("outbox", "relay"), ("inbox", "consumer")])
def test_a_beat_with_long_texts_leaves_a_short_row(
    side: str, role: str, database_url: str
) -> None:
    long = "repeat('x', 30000000)"
    with role_of(database_url, role) as connection:
        connection.execute(
            f"SELECT {side}.beat(gen_random_uuid(), {long}, {long}, {long}, {long},"
            f" now(), {long}, 0, 0, false)"
        )
    ((size,),) = execute(database_url, f"SELECT length(p::text) FROM {side}.process p")
    assert size < 5000


@pytest.mark.parametrize("up_to", [10**15, 2**62])
async def test_a_position_beyond_the_sequence_stops_nobody(
    up_to: int, database_url: str
) -> None:
    publisher = ScriptedPublisher()
    insert(database_url, Message("before", b"", key="k"))
    with role_of(database_url, "relay") as connection:
        values = {**USUAL, "number": LAST, "up_to": up_to}
        connection.execute(POSITION.format(**values))
    migrate_for_a_week(database_url)
    async with running(database_url, publisher):
        insert(database_url, *[Message("t", b"", key=f"{n}") for n in range(40)])
        await publisher.until_acked(41)
    assert unsettled(database_url) == 0
    assert execute(database_url, "SELECT max(seq) < 100 FROM outbox.message") == [
        (True,)
    ]
