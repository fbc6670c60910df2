"""No setting of ALTER DATABASE breaks our processes and commands."""

from collections import Counter
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from pillarbox import Consumer, Message, add
from pillarbox.inbox.events import MessageDeadLettered, MessageHandled
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.dead_letters.criteria import Criteria
from pillarbox.outbox.dead_letters.retry import retry_all
from pillarbox.outbox.postgres.connection import connect, sqlalchemy_url
from pillarbox.outbox.testing.postgres import PostgresServer
from pillarbox.relay.events import MessageDeadLettered as GivenUp
from pillarbox.relay.publisher import Acked, Nacked
from tests.fixtures.consumers import QUICK, async_sessions_of, running
from tests.fixtures.dead_letters import find, give_up
from tests.fixtures.positions import defer, publish
from tests.fixtures.postgres import migrate_for_a_week
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import insert
from tests.fixtures.relay import running as relaying
from tests.fixtures.sessions import execute
from tests.fixtures.upkeep import run_upkeep
from tests.outbox.administration.test_upkeep import old_partition

ODD = {
    "DateStyle": "SQL, DMY",
    "IntervalStyle": "iso_8601",
    # PostgreSQL reads its abbreviation, IST, as Israel Standard Time.
    "TimeZone": "Asia/Kolkata",
    "bytea_output": "escape",
    "extra_float_digits": "-15",
    "quote_all_identifiers": "on",
    "client_encoding": "LATIN1",
    "default_transaction_isolation": "serializable",
    "array_nulls": "off",
    "standard_conforming_strings": "off",
}


def make_odd(server: PostgresServer, url: str) -> str:
    name = url.rpartition("/")[2].partition("?")[0]
    for setting, value in ODD.items():
        execute(server.url, f"ALTER DATABASE \"{name}\" SET {setting} = '{value}'")
    return url


@pytest.fixture
def odd_url(server: PostgresServer, database_url: str) -> str:
    return make_odd(server, database_url)


async def test_our_own_sessions_override_the_settings_of_the_database(
    odd_url: str,
) -> None:
    settings = "SELECT name, setting FROM pg_settings WHERE name = ANY (%s)"
    async with await connect(odd_url, application_name="settings") as connection:
        found = await (await connection.execute(settings, [list(ODD)])).fetchall()

    assert dict(found) == {
        "DateStyle": "ISO, MDY",
        "IntervalStyle": "postgres",
        "TimeZone": "UTC",
        "bytea_output": "hex",
        "extra_float_digits": "1",
        "quote_all_identifiers": "off",
        "client_encoding": "UTF8",
        "default_transaction_isolation": "read committed",
        "array_nulls": "on",
        "standard_conforming_strings": "on",
    }


async def test_no_idle_session_timeout_ends_our_sessions(database_url: str) -> None:
    url = f"{database_url}?options=-c%20idle_session_timeout%3D60000"
    async with await connect(url, application_name="idle") as connection:
        found = await (await connection.execute("SHOW idle_session_timeout")).fetchone()
    assert found == ("0",)


async def test_a_relay_publishes_retries_and_dead_letters(odd_url: str) -> None:
    insert(odd_url, Message("t", b"1", key="k"), Message("bad", b"\xff\\"))
    execute(f"{odd_url}?client_encoding=utf8", "UPDATE outbox.message SET key = '中€'")
    publisher = ScriptedPublisher(
        lambda m: Nacked("no", permanent=True) if m.topic == "bad" else Acked()
    )

    async with relaying(odd_url, publisher) as relay:
        await publisher.until_acked(1)
        await relay.events.wait_for(GivenUp)

    assert [(m.key, m.payload) for m in publisher.acked] == [("中€", b"1")]


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "asyncpg"])
async def test_messages_without_a_key_or_with_the_key_null_stay_what_they_are(
    odd_url: str, driver: str
) -> None:
    messages = [
        Message("t", b"\\", key="NULL", headers={"a": "\\é"}),
        Message("t", b"\xff", tenant="null"),
        Message("t", b"\xff", available_at=datetime(2026, 1, 2, 3, tzinfo=UTC)),
    ]
    for several in messages, messages[:1], messages[1:2]:
        if driver == "asyncpg":
            async with (
                async_sessions_of(odd_url, driver) as made,
                made() as session,
                session.begin(),
            ):
                add(session, *several)
        else:
            engine = create_engine(sqlalchemy_url(odd_url).replace("psycopg", driver))
            with Session(engine) as plain, plain.begin():
                add(plain, *several)
            engine.dispose()
    execute(odd_url, "SELECT outbox.add('t', %s::bytea, tenant => 'null')", [b"\xff"])

    found = execute(
        f"{odd_url}?client_encoding=utf8&options=-cTimeZone%3DUTC"
        "%20-cDateStyle%3DISO%20-cbytea_output%3Dhex",
        "SELECT key, tenant, payload, available_at::timestamptz, headers"
        " FROM outbox.message ORDER BY seq",
    )
    expected = [
        (m.key, m.tenant, m.payload, m.available_at, dict(m.headers)) for m in messages
    ]
    assert found == [*expected, *expected[:2], expected[1]]


def commands(url: str) -> list[list[str]]:
    ids = execute(url, "SELECT id::text FROM outbox.dead_letter")
    return [
        ["dead-letters", "list"],
        ["dead-letters", "list", "--until", "1s"],
        ["dead-letters", "show", ids[0][0]],
        ["dead-letters", "export"],
        ["dead-letters", "list", "--side", "inbox"],
        ["blocked"],
        ["replay", "--since", "1h", "--dry-run"],
        ["jobs"],
        ["trace", "--key", "k"],
        ["partitions"],
        ["retention", "show"],
        ["maintain", "--dry-run"],
        ["doctor"],
    ]


def fill(url: str) -> None:
    for schema in ("outbox", "inbox"):
        give_up(url, Message("t", b"1"), schema=schema, age=timedelta(hours=1))
    insert(url, Message("t", b"1", key="k"), Message("t", b"1"))
    defer(url, "refused", "key = 'k'", attempts=1)
    publish(url, "key IS NULL")
    execute(
        url,
        "WITH new AS (SELECT outbox.uuid7() AS id)"
        " INSERT INTO inbox.job (message_id, message_at, consumer)"
        " SELECT id, inbox.moment_of(id), 'c' FROM new",
    )


def test_every_command_accepts_moments_and_durations(
    server: PostgresServer, database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(database_url)
    old_partition(database_url)
    asked = [
        [*arguments, "--database", database_url] for arguments in commands(database_url)
    ]

    def answers() -> list[tuple[int, int]]:
        return [
            (main(arguments), len(capsys.readouterr().out.splitlines()))
            for arguments in asked
        ]

    usual = answers()
    assert {status for status, _ in usual[:-1]} == {0}
    make_odd(server, database_url)

    assert answers() == usual
    assert main(["maintain", "--database", database_url]) == 0
    assert main(["migrate", "--without-cron", "--database", database_url]) == 0


def test_a_migration_makes_partitions_at_midnight_utc(
    server: PostgresServer, empty_database_url: str
) -> None:
    url = make_odd(server, empty_database_url)
    migrate_for_a_week(url)
    run_upkeep(url)

    ((begins, count),) = execute(
        f"{url}?options=-cDateStyle%3DISO%20-cTimeZone%3DUTC",
        "SELECT array_agg(DISTINCT starts_at::time), count(*)"
        " FROM outbox.partitions('outbox.message')",
    )
    assert [str(begin) for begin in begins] == ["00:00:00"]
    assert count >= 8


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_a_consumer_handles_and_retries_in_the_users_sessions(
    odd_url: str, driver: str
) -> None:
    styles = []
    async with async_sessions_of(odd_url, driver) as sessions:
        consumer = Consumer(
            MemorySource(Message("good", b"1"), Message("bad", b"1")),
            sessions,
            name="c",
            retry=QUICK,
        )

        @consumer.handles("*")
        async def handle(session: AsyncSession, message: Message) -> None:
            styles.append(await session.scalar(text("SHOW DateStyle")))
            if message.topic == "bad" and len(styles) < 5:
                raise ValueError(message.topic)

        async with running(consumer) as events:
            await events.wait_for(MessageHandled)
            await events.wait_for(MessageDeadLettered)
        execute(odd_url, "UPDATE inbox.dead_letter SET retry_after = now()")
        async with consumer.retrier() as retrier:
            found = await find(retrier, Criteria())
            assert await retry_all(retrier, found) == Counter(succeeded=1)

    # In a retry, the handler's own dates are still read as day, month, year.
    assert {style.rpartition(", ")[2] for style in styles} == {"DMY"}


REFUSED = psycopg.errors.CheckViolation


def test_a_timestamp_that_python_cannot_read_is_refused(database_url: str) -> None:
    fill(database_url)
    insert(database_url, Message("t", b""))
    for moment in ("infinity", "-infinity", "0044-03-15 BC", "10000-01-01"):
        for update in (
            "outbox.message SET available_at",
            "outbox.deferral SET due_at",
            "outbox.dead_letter SET retry_after",
            "inbox.dead_letter SET retry_after",
            "inbox.dead_letter SET updated_at",
            "inbox.job SET queued_at",
            "inbox.job SET lease_until",
        ):
            with pytest.raises(REFUSED, match="finite"):
                execute(database_url, f"UPDATE {update} = %s", [moment])
        with pytest.raises(REFUSED, match="moments_finite"):
            execute(
                database_url,
                "INSERT INTO outbox.deferral (created_at, seq, id, lane, cause, due_at)"
                " VALUES (now(), 1, outbox.uuid7(), 0, 'refused', %s)",
                [moment],
            )
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="available_at"):
            execute(
                database_url,
                "SELECT outbox.add('t', '\\x'::bytea, available_at => %s)",
                [moment],
            )


def test_no_timestamp_of_our_tables_is_without_limits(database_url: str) -> None:
    unlimited = """
        SELECT c.oid::regclass::text, a.attname
          FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
         WHERE c.relnamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace)
           AND c.relkind IN ('r', 'p') AND a.atttypid = 'timestamptz'::regtype
           AND c.relname NOT LIKE '%template'
           AND NOT EXISTS (
               SELECT FROM pg_constraint n
                WHERE n.conrelid = c.oid AND n.contype = 'c' AND n.convalidated
                  AND pg_get_constraintdef(n.oid) LIKE '%' || a.attname || ' >= %'
                  AND pg_get_constraintdef(n.oid) LIKE '%' || a.attname || ' <= %')"""
    run_upkeep(database_url)
    assert execute(database_url, unlimited) == []
