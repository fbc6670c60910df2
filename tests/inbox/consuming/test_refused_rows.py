"""Any message can be dead-lettered, and does not delay others."""

import json
from datetime import timedelta
from uuid import UUID

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from pillarbox import DeadLetter, Message
from pillarbox.inbox.events import (
    DeadLetterRepeated,
    HandlerDatabaseLost,
    HandlerDatabaseRecovered,
    MessageDeadLettered,
    MessageHandled,
)
from pillarbox.inbox.jobs.job import AsyncJob
from pillarbox.inbox.sources.memory import MemorySource
from tests.fixtures.consumers import QUICK, consuming
from tests.fixtures.sessions import execute

pytestmark = pytest.mark.timeout(180)


CHECK = "ALTER TABLE inbox.dead_letter ADD CONSTRAINT taken CHECK ({})"


async def accept(session: AsyncSession, message: Message) -> None: ...


@pytest.mark.parametrize(
    ("odd", "reason", "kept"),
    [
        (
            Message("orders", b"odd", headers={"h": "v"}, schema_version=3_000_000_000),
            "message schema_version 3000000000: is above 2147483647",
            ("orders", 2**31 - 1, {"h": "v"}),
        ),
        (
            Message("orders", b"odd", id=UUID("ffffffff-ffff-7fff-bfff-ffffffffffff")),
            "has a time after the year 9999",
            ("orders", 1, {}),
        ),
    ],
    ids=["schema_version", "id"],
)
async def test_what_the_table_cannot_hold_is_escaped_or_cut(
    database_url: str, odd: Message, reason: str, kept: tuple[str, int, dict[str, str]]
) -> None:
    sound = Message("orders", b"sound")
    source = MemorySource(odd, sound)
    async with consuming(database_url, source, accept, retry=QUICK) as events:
        (given_up,) = await events.wait_for(MessageDeadLettered)
        (handled,) = await events.wait_for(MessageHandled)
    assert handled.id == sound.id
    assert events.of(HandlerDatabaseLost) == []
    assert reason in given_up.reason
    query = "SELECT topic, schema_version, headers, payload FROM inbox.dead_letter"
    assert execute(database_url, query) == [(*kept, b"odd")]


async def test_a_long_handler_accepts_text_that_postgresql_cannot_store(
    database_url: str,
) -> None:
    odd, handled = Message("or\0ders", b"", key="k\0\ud800", tenant="t\0"), []

    async def handle(job: AsyncJob, message: Message) -> None:
        handled.append(message)

    terms = {"lease": timedelta(seconds=30)}
    async with consuming(database_url, MemorySource(odd), handle, terms) as events:
        await events.wait_for(MessageHandled)
    assert handled == [odd]
    query = "SELECT topic, key, tenant, state FROM inbox.job"
    assert execute(database_url, query) == [
        (r"or\0ders", r"k\0\ud800", r"t\0", "success")
    ]


@pytest.mark.parametrize("driver", ["psycopg async", "asyncpg"])
async def test_a_refused_row_is_stored_as_a_spare_row_with_its_payload(
    database_url: str, driver: str
) -> None:
    execute(database_url, CHECK.format("tenant IS NULL"))
    message = Message(
        "örders",
        b"\0\xff",
        key="k",
        tenant="t\0",
        headers={"h": "\0"},
        schema_version=7,
    )
    source = MemorySource(message)
    async with consuming(
        database_url,
        source,
        accept,
        topic="invoices",
        driver=driver,
        rollout=timedelta(0),
    ) as events:
        await events.wait_for(MessageDeadLettered)
        source.add(message)
        await events.wait_for(DeadLetterRepeated)
    assert events.of(HandlerDatabaseLost) == []
    assert len(source.acked) == 2
    query = (
        "SELECT message_id, topic, key, tenant, headers, payload, error_reason"
        " FROM inbox.dead_letter"
    )
    ((id, topic, key, tenant, headers, payload, reason),) = execute(database_url, query)
    assert id.startswith("sha256:")
    assert (topic, key, tenant, payload) == (r"\xf6rders", None, None, b"\0\xff")
    assert json.loads(headers["message"]) == {
        "id": str(message.id),
        "topic": "örders",
        "key": "k",
        "tenant": "t\0",
        "content_type": "application/octet-stream",
        "schema_version": "7",
        "headers": {"h": "\0"},
    }
    assert "no handler for topic 'örders'" in reason
    assert "(stored in a spare row, because PostgreSQL" in reason
    assert "SQLSTATE 23514)" in reason


@pytest.mark.parametrize("terms", [{}, {"lease": timedelta(seconds=30)}], ids=str)
async def test_a_key_that_is_too_long_for_lists_is_kept_in_a_header(
    database_url: str, terms: dict[str, timedelta]
) -> None:
    async def refuse(session_or_job: object, message: Message) -> None:
        raise DeadLetter("no such customer")

    odd = Message("orders", b"odd", key="k" * 70_000)
    async with consuming(database_url, MemorySource(odd), refuse, terms) as events:
        await events.wait_for(MessageDeadLettered)
    assert events.of(HandlerDatabaseLost) == []
    query = "SELECT key, headers ->> 'message', payload FROM inbox.dead_letter"
    ((key, header, payload),) = execute(database_url, query)
    assert (key, json.loads(header)["key"], payload) == (None, odd.key, odd.payload)


async def test_a_dead_letter_that_cannot_be_stored_at_all_is_retried_until_it_is(
    database_url: str,
) -> None:
    execute(database_url, CHECK.format("origin = ''"))
    source = MemorySource(Message("orders", b"", tenant="t"))
    async with consuming(
        database_url, source, accept, topic="invoices", rollout=timedelta(0)
    ) as events:
        await events.wait_for(HandlerDatabaseLost)
        execute(database_url, "ALTER TABLE inbox.dead_letter DROP CONSTRAINT taken")
        await events.wait_for(HandlerDatabaseRecovered)
        await events.wait_for(MessageDeadLettered)
    query = "SELECT topic, tenant FROM inbox.dead_letter"
    assert execute(database_url, query) == [("orders", "t")]
