"""Each error of the database has the remedy that fits it."""

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError, TimeoutError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import QueuePool

from pillarbox import Message
from pillarbox.outbox.errors import DatabaseUnavailableError, sqlstate_of
from pillarbox.outbox.postgres.connection import connect
from pillarbox.outbox.postgres.remedy import remedy_of
from pillarbox.outbox.testing.lifetime import free_port
from pillarbox.outbox.testing.postgres import PostgresServer
from pillarbox.relay.events import DatabaseLost, LeaseTaken
from tests.fixtures.passwords import ask_for_passwords, set_password
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import insert, running
from tests.fixtures.sessions import execute

DOCTOR = "pillarbox doctor"


async def refusal(url: str) -> DatabaseUnavailableError:
    with pytest.raises(DatabaseUnavailableError) as refused:
        async with await connect(url, application_name="test"):
            pass
    return refused.value


async def test_a_refused_connection_has_the_remedy_for_its_cause(
    migrated_server: PostgresServer,
) -> None:
    url = migrated_server.url
    mary = set_password(url, "mary", "right")
    ask_for_passwords(url, "mary")
    execute(url, "CREATE ROLE limited LOGIN CONNECTION LIMIT 0")
    execute(url, "CREATE ROLE locked_out NOLOGIN")
    execute(url, "CREATE DATABASE private")
    execute(url, "REVOKE CONNECT ON DATABASE private FROM public")
    of_cause = {
        mary.replace("right", "wrong"): "user and password",
        mary.replace(":right", ""): "user and password",
        url.replace("postgres@", "nobody@"): "user and password",
        url.replace("postgres@", "locked_out@"): "user and password",
        url.replace("/pillarbox", "/nowhere"): "the name of the database",
        url.replace("postgres@", "limited@"): "CONNECTION LIMIT",
        mary.replace("/pillarbox", "/private"): DOCTOR,
        f"postgresql://127.0.0.1:{free_port()}/shop": "that this host can reach it",
    }
    for refused, words in of_cause.items():
        assert words in remedy_of(await refusal(refused)), refused


async def test_a_user_without_a_home_directory_is_told_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(_: int) -> None:
        raise KeyError  # as for the user of a unit with DynamicUser

    for variable in ("HOME", "PGPASSWORD", "PGPASSFILE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    url = f"postgresql://mary@127.0.0.1:{free_port()}/shop"
    assert "this host can reach it" in remedy_of(await refusal(url))


async def test_a_server_that_accepts_no_writes_has_a_remedy(
    database_url: str,
) -> None:
    execute(
        database_url,
        """
        DO $$ BEGIN
            EXECUTE format('ALTER DATABASE %I SET default_transaction_read_only = on',
                           current_database());
        END $$
        """,
    )
    error = await refusal(f"{database_url}?target_session_attrs=read-write")
    assert "not to a standby" in remedy_of(error)


@pytest.mark.parametrize(
    ("sqlstate", "words"),
    [
        ("25006", "not to a standby"),
        ("3F000", DOCTOR),
        ("42501", DOCTOR),
        ("42P01", DOCTOR),
        ("53100", "disk space"),
        ("53200", "memory"),
        ("53300", "max_connections"),
        ("57014", "statement_timeout"),
        ("53200", "max_locks_per_transaction"),
        ("57P01", "restarted"),
        ("57P05", "idle_session_timeout"),
        ("57P03", "restarted"),
        ("XX001", "log of the database's server"),
    ],
)
def test_a_remedy_is_chosen_by_sqlstate(sqlstate: str, words: str) -> None:
    assert words in remedy_of(psycopg.errors.lookup(sqlstate)("no"))


async def test_an_error_of_any_driver_and_an_exhausted_pool_have_their_remedy(
    database_url: str,
) -> None:
    for driver in ("psycopg", "psycopg2"):
        engine = create_engine(database_url.replace("://", f"+{driver}://"))
        with pytest.raises(DBAPIError) as refused, engine.connect() as connection:
            connection.execute(text("SELECT FROM missing"))
        engine.dispose()
        assert (driver, sqlstate_of(refused.value)) == (driver, "42P01")
        assert DOCTOR in remedy_of(refused.value)

    asynchronous = create_async_engine(database_url.replace("://", "+asyncpg://"))
    with pytest.raises(DBAPIError) as refused:
        async with asynchronous.connect() as connection:
            await connection.execute(text("SELECT FROM missing"))
    await asynchronous.dispose()
    assert DOCTOR in remedy_of(refused.value)

    engine = create_engine(
        database_url.replace("://", "+psycopg://"),
        poolclass=QueuePool,
        pool_size=1,
        max_overflow=0,
        pool_timeout=0.01,
    )
    with engine.connect(), pytest.raises(TimeoutError) as exhausted:
        engine.connect()
    engine.dispose()
    assert "pool_size" in remedy_of(exhausted.value)


async def test_a_relay_reports_the_remedy_for_what_happened(
    migrated_server: PostgresServer,
) -> None:
    url = migrated_server.url
    relays = set_password(url, "mary", "right")
    async with running(relays, ScriptedPublisher()) as relay:
        await relay.events.wait_for(LeaseTaken)
        execute(url, "REVOKE INSERT ON outbox.position FROM pillarbox_relay")
        insert(url, Message("t", b""))
        await relay.events.wait_for(DatabaseLost)
        assert DOCTOR in relay.events.of(DatabaseLost)[0].remedy
        execute(url, "GRANT INSERT ON outbox.position TO pillarbox_relay")
