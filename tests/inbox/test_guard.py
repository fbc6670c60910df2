"""The guard, as a context manager and as a decorator: a message is handled once."""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import Session

from inbox.errors import InvalidReceiptError
from inbox.receipt import ForeignId
from outbox.errors import NotASessionError
from pillarbox import Message, guard, idempotent, uuid7
from tests.fixtures.consumers import (
    async_sessions_of,
    is_plain,
    sessions_by,
    sessions_of,
)
from tests.fixtures.effects import EFFECT, effects, receipts


@idempotent(consumer="billing")
def bill(session: Session, message: Message) -> str:
    session.execute(EFFECT, {"what": message.topic})
    return f"billed {message.topic}"


@idempotent(consumer="billing")
async def bill_async(session: AsyncSession, message: Message) -> str:
    await session.execute(EFFECT, {"what": message.topic})
    return f"billed {message.topic}"


@dataclass(frozen=True)
class StripeEvent:
    id: str


def stripe_id(event: StripeEvent) -> ForeignId:
    return ForeignId("stripe", event.id)


@idempotent(consumer="billing", key=stripe_id)
def on_stripe(session: Session, event: StripeEvent) -> str:
    session.execute(EFFECT, {"what": event.id})
    return event.id


@pytest.mark.parametrize("id", [uuid7(), ForeignId("stripe", "evt_1")])
async def test_a_message_is_new_once(id: ForeignId, url: str) -> None:
    seen = []
    with sessions_of(url) as sessions:
        for _ in range(2):
            with sessions.begin() as session, guard(session, id, consumer="a") as new:
                seen.append(new)
    async with async_sessions_of(url) as asynchronous:
        for consumer in ("a", "b"):
            async with (
                asynchronous.begin() as session_,
                guard(session_, id, consumer=consumer) as new,
            ):
                seen.append(new)
        for _ in range(2):
            scoped = async_scoped_session(asynchronous, asyncio.current_task)
            async with scoped.begin(), guard(scoped, id, consumer="c") as new:
                seen.append(new)
            await scoped.remove()
    assert seen == [True, False, False, True, True, False]


@pytest.mark.parametrize(
    ("driver", "handler", "message", "answer"),
    [
        ("psycopg", bill, Message("orders", b""), "billed orders"),
        ("psycopg async", bill_async, Message("orders", b""), "billed orders"),
        ("asyncpg", bill_async, Message("orders", b""), "billed orders"),
        ("psycopg", on_stripe, StripeEvent("evt_1"), "evt_1"),
    ],
)
async def test_an_idempotent_function_answers_a_duplicate_with_none(
    driver: str, handler: Any, message: Any, answer: str, url: str
) -> None:
    answers = []
    async with sessions_by(url, driver) as sessions:
        for _ in range(2):
            if is_plain(driver):
                with sessions.begin() as session:
                    answers.append(handler(session, message))
            else:
                async with sessions.begin() as session:
                    answers.append(await handler(session, message))
    assert answers == [answer, None]
    assert len(effects(url)) == 1
    assert bill.__name__ == "bill"
    assert bill_async.__name__ == "bill_async"


def in_guard(session: Session, message: Message) -> None:
    with guard(session, message.id, consumer="billing"):
        session.execute(EFFECT, {"what": "done"})
        if message.payload == b"bad":
            raise ValueError("broken")


@idempotent(consumer="billing")
def in_function(session: Session, message: Message) -> None:
    session.execute(EFFECT, {"what": "done"})
    if message.payload == b"bad":
        raise ValueError("broken")


@pytest.mark.parametrize("handle", [in_guard, in_function])
def test_a_failure_leaves_neither_receipt_nor_effect(handle: Any, url: str) -> None:
    id = uuid7()
    with sessions_of(url) as sessions:
        with pytest.raises(ValueError, match="broken"), sessions.begin() as session:
            handle(session, Message("orders", b"bad", id=id))
        assert (effects(url), receipts(url)) == ([], 0)
        with sessions.begin() as session:
            handle(session, Message("orders", b"good", id=id))
    assert (effects(url), receipts(url)) == (["done"], 1)


async def test_the_wrong_kind_of_session_is_refused(url: str) -> None:
    message = Message("orders", b"")
    with (
        sessions_of(url) as sessions,
        sessions() as session,
        pytest.raises(NotASessionError, match="plain"),
    ):
        await bill_async(session, message)  # type: ignore[arg-type]
    async with async_sessions_of(url) as asynchronous, asynchronous() as session_:
        with pytest.raises(NotASessionError, match="run_sync"):
            bill(session_, message)  # type: ignore[arg-type]
        with pytest.raises(NotASessionError), guard(session_, uuid7(), consumer="a"):
            pass


def test_an_invalid_consumer_or_id_is_refused_with_the_remedy(url: str) -> None:
    with sessions_of(url) as sessions, sessions() as session:
        with pytest.raises(InvalidReceiptError, match="consumer"):
            guard(session, uuid7(), consumer="")
        with (
            pytest.raises(InvalidReceiptError, match=r"is a str; pass uuid\.UUID\(…\)"),
            guard(session, str(uuid7()), consumer="a"),  # type: ignore[arg-type]
        ):
            pass
