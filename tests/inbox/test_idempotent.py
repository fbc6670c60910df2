"""`@idempotent` records the receipt with the effects, and handles a message once."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from inbox.receipt import ForeignId
from outbox.errors import NotASessionError
from outbox.postgres.connection import sqlalchemy_url
from pillarbox import Message, idempotent
from tests.fixtures.consumers import async_sessions_of
from tests.fixtures.sessions import execute

CHARGE = text("INSERT INTO charge (what) VALUES (:what)")


@pytest.fixture
def url(database_url: str) -> str:
    execute(database_url, "CREATE TABLE charge (what text)")
    return database_url


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    engine = create_engine(sqlalchemy_url(url))
    yield engine
    engine.dispose()


def charges(url: str) -> list[str]:
    return [what for (what,) in execute(url, "SELECT what FROM charge ORDER BY what")]


@idempotent(consumer="billing")
def bill(session: Session, message: Message) -> str:
    session.execute(CHARGE, {"what": message.topic})
    return f"billed {message.topic}"


@idempotent(consumer="billing")
async def bill_async(session: AsyncSession, message: Message) -> str:
    await session.execute(CHARGE, {"what": message.topic})
    return f"billed {message.topic}"


@dataclass(frozen=True)
class StripeEvent:
    id: str


def stripe_id(event: StripeEvent) -> ForeignId:
    return ForeignId("stripe", event.id)


@idempotent(consumer="billing", key=stripe_id)
def on_stripe(session: Session, event: StripeEvent) -> str:
    session.execute(CHARGE, {"what": event.id})
    return event.id


def test_a_duplicate_is_not_handled_again(engine: Engine, url: str) -> None:
    message = Message("orders", b"")
    answers = []
    for _ in range(2):
        with Session(engine) as session, session.begin():
            answers.append(bill(session, message))
    assert answers == ["billed orders", None]
    assert charges(url) == ["orders"]


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_an_async_duplicate_is_not_handled_again(url: str, driver: str) -> None:
    message = Message("orders", b"")
    answers = []
    async with async_sessions_of(url, driver) as sessions:
        for _ in range(2):
            async with sessions.begin() as session:
                answers.append(await bill_async(session, message))
    assert answers == ["billed orders", None]
    assert charges(url) == ["orders"]


def test_a_handler_that_raises_leaves_neither_receipt_nor_effects(
    engine: Engine, url: str
) -> None:
    message = Message("orders", b"")

    @idempotent(consumer="billing")
    def fail(session: Session, message: Message) -> None:
        session.execute(CHARGE, {"what": "never"})
        raise RuntimeError("no money")

    with (
        pytest.raises(RuntimeError, match="no money"),
        Session(engine) as session,
        session.begin(),
    ):
        fail(session, message)
    with Session(engine) as session, session.begin():
        assert bill(session, message) == "billed orders"
    assert charges(url) == ["orders"]


def test_foreign_messages_are_identified_by_a_custom_key_function(
    engine: Engine, url: str
) -> None:
    event = StripeEvent("evt_1")
    for expected in ("evt_1", None):
        with Session(engine) as session, session.begin():
            assert on_stripe(session, event) == expected
    assert charges(url) == ["evt_1"]


def test_an_idempotent_function_keeps_its_name() -> None:
    assert bill.__name__ == "bill"
    assert bill_async.__name__ == "bill_async"


async def test_the_wrong_kind_of_session_is_refused(engine: Engine, url: str) -> None:
    message = Message("orders", b"")
    with Session(engine) as session, pytest.raises(NotASessionError, match="plain"):
        await bill_async(session, message)  # type: ignore[arg-type]
    async with async_sessions_of(url) as sessions, sessions() as session_:
        with pytest.raises(NotASessionError, match="run_sync"):
            bill(session_, message)  # type: ignore[arg-type]
