"""No receipt in AUTOCOMMIT mode, where a failed handler would count as handled."""

from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from pillarbox import Consumer, Message, guard, idempotent, record_receipt
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.errors import AutocommitError
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from tests.fixtures.consumers import DRIVERS, is_plain, sessions_by
from tests.fixtures.endings import EFFECT, effects, make_effects, receipts
from tests.fixtures.sessions import execute

AUTOCOMMIT: Final = {"isolation_level": "AUTOCOMMIT"}
SETTINGS: Final[dict[str, tuple[dict[str, Any], dict[str, Any], str]]] = {
    "engine": (AUTOCOMMIT, {}, r'create_engine\(isolation_level="AUTOCOMMIT"\)'),
    "option": ({}, AUTOCOMMIT, r'execution_options\(isolation_level="AUTOCOMMIT"\)'),
    "driver": (
        {"connect_args": {"autocommit": True}},
        {},
        "autocommit=True in connect_args",
    ),
}
"""The engine's settings, its execution options, and what the error names."""
CASES: Final = [
    (driver, setting)
    for driver in DRIVERS
    for setting in SETTINGS
    # Only psycopg accepts this setting.
    if setting != "driver" or (driver.startswith("psycopg") and driver != "psycopg2")
]


def sessions_for(
    url: str, driver: str, setting: str
) -> AbstractAsyncContextManager[Any]:
    settings, options, _ = SETTINGS[setting]
    return sessions_by(url, driver, settings, options)


def handle(session: Session, message: Message) -> None:
    session.execute(EFFECT, {"what": "done"})


async def handle_async(session: AsyncSession, message: Message) -> None:
    await session.execute(EFFECT, {"what": "done"})


def handler_of(driver: str) -> Any:
    return handle if is_plain(driver) else handle_async


@pytest.fixture
def url(database_url: str) -> str:
    make_effects(database_url)
    return database_url


@pytest.mark.parametrize(("driver", "setting"), CASES)
async def test_consumer_and_guard_refuse_autocommit_before_they_call_the_handler(
    driver: str, setting: str, url: str
) -> None:
    message = Message("orders", b"1")
    refused = pytest.raises(AutocommitError, match=SETTINGS[setting][-1])
    guarded: Any = idempotent(consumer="billing")(handler_of(driver))
    async with sessions_for(url, driver, setting) as sessions:
        consumer = Consumer(MemorySource(message), sessions, name="billing")
        consumer.handles("*")(handler_of(driver))
        with refused:
            await consumer.run()
        if is_plain(driver):
            with refused, sessions.begin() as session:
                guarded(session, message)
            with (
                refused,
                sessions.begin() as session,
                guard(session, message.id, consumer="billing"),
            ):
                handle(session, message)
        else:
            with refused:
                async with sessions.begin() as session:
                    await guarded(session, message)
            with refused:
                async with (
                    sessions.begin() as session,
                    guard(session, message.id, consumer="billing"),
                ):
                    await handle_async(session, message)
    assert (effects(url), receipts(url)) == ([], 0)


def test_a_refused_receipt_leaves_the_session_usable(
    url: str,
) -> None:
    engine = create_engine(sqlalchemy_url(url), isolation_level="AUTOCOMMIT")
    id = Message("orders", b"1").id
    with Session(engine) as session:
        with pytest.raises(AutocommitError, match="a rollback keeps the receipt"):
            record_receipt(session, id, "billing")
        session.rollback()
        session.connection(execution_options={"isolation_level": "READ COMMITTED"})
        assert record_receipt(session, id, "billing")
        session.rollback()
    engine.dispose()
    assert execute(url, "SELECT * FROM inbox.receipt") == []
