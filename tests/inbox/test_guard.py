"""The guard, as a context manager and as a decorator: a message is handled once.

A handler can't record its own receipt again: what it calls needs another name.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy.exc import ResourceClosedError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import Session

import pillarbox
from pillarbox import Message, guard, idempotent, record_receipt, uuid7
from pillarbox.inbox.errors import HandlerTransactionError, InvalidReceiptError
from pillarbox.inbox.events import MessageDeadLettered, MessageHandled
from pillarbox.inbox.receipt import ForeignId
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.errors import NotASessionError
from tests.fixtures.consumers import (
    DRIVERS,
    async_sessions_of,
    consuming,
    is_plain,
    numbered,
    recorded_statements,
    sessions_by,
    sessions_of,
)
from tests.fixtures.effects import EFFECT, effects, receipts
from tests.fixtures.sessions import execute
from tests.fixtures.variants import in_turn


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


@pytest.mark.parametrize("handle", [in_guard, in_function])
def test_the_guard_adds_one_statement(handle: Any, url: str) -> None:
    with sessions_of(url) as sessions, recorded_statements(sessions) as seen:
        for message in numbered(2):
            with sessions.begin() as session:
                handle(session, message)
    expected = ["INSERT INTO inbox.receipt", "INSERT INTO effect", "COMMIT"]
    assert [" ".join(said.split()[:3]) for said in seen] == expected * 2


def test_messages_added_by_a_handler_have_its_causation_id_or_their_own(
    database_url: str,
) -> None:
    @idempotent(consumer="billing")
    def handle(session: Session, message: Message) -> None:
        mine = Message("bill", b"", headers={"causation-id": "mine"})
        pillarbox.add(session, Message("bill", b"1"), Message("bill", b"2"), mine)

    message = Message("orders.placed", b"")
    with sessions_of(database_url) as sessions, sessions() as session:
        with session.begin():
            handle(session, message)
        with session.begin():
            pillarbox.add(session, Message("unrelated", b""))

    query = "SELECT headers ->> 'causation-id' FROM outbox.message ORDER BY seq"
    causes = [cause for (cause,) in execute(database_url, query)]
    assert causes == [str(message.id), str(message.id), "mine", None]


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
        with pytest.raises(NotASessionError), guard(session_, uuid7(), consumer="a"):  # type: ignore[misc]
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


REMEDY = "its own consumer name"


def by_order(message: Message) -> ForeignId:
    return ForeignId("orders", message.payload.decode())


def insert(session: Session, message: Message) -> None:
    session.execute(EFFECT, {"what": message.topic})


mail = idempotent(consumer="mail")(insert)
bill_order = idempotent(consumer="billing", key=by_order)(insert)


def call_own(session: Session, messages: Any) -> None:
    for message in messages if isinstance(messages, list) else [messages]:
        mail(session, message)
        bill(session, message)


@idempotent(consumer="billing", key=by_order)
def call_own_by_order(session: Session, message: Message) -> None:
    mail(session, message)
    bill_order(session, message)


def call_own_in_guard(session: Session, message: Message) -> None:
    with guard(session, message.id, consumer="billing"):
        call_own(session, message)


@pytest.mark.parametrize(
    "call",
    [
        idempotent(consumer="billing")(call_own),
        call_own_by_order,
        call_own_in_guard,
    ],
)
def test_what_a_handler_calls_under_its_own_name_is_refused_with_the_remedy(
    url: str, call: Any
) -> None:
    with (
        sessions_of(url) as sessions,
        pytest.raises(InvalidReceiptError, match=REMEDY),
        sessions.begin() as session,
    ):
        call(session, Message("orders", b"order 1"))
    assert effects(url) == []


async def call_own_async(session: AsyncSession, messages: Any) -> None:
    await session.run_sync(call_own, messages)


@pytest.mark.parametrize("call", [call_own, call_own_async])
@pytest.mark.parametrize("terms", [{}, {"batch": 2}], ids=str)
async def test_a_consumers_handler_that_calls_functions_of_its_name_is_dead_lettered(
    terms: dict[str, Any], call: Any, url: str
) -> None:
    source = MemorySource(Message("orders", b"1"))
    async with consuming(url, source, call, terms) as events:
        (given_up,) = await events.wait_for(MessageDeadLettered)
    assert REMEDY in given_up.reason
    assert effects(url) == []


def test_a_message_that_comes_twice_in_one_transaction_is_handled_once(
    url: str,
) -> None:
    message = Message("orders", b"")
    seen: list[bool] = []
    with sessions_of(url) as sessions, sessions.begin() as session:
        for _ in range(2):
            with guard(session, message.id, consumer="billing") as is_new:
                seen.append(is_new)
        bill(session, message)
        assert not record_receipt(session, message.id, "billing")
    assert seen == [True, False]
    assert effects(url) == []


def test_a_handler_can_run_again_after_a_rollback_to_a_savepoint(url: str) -> None:
    message = Message("orders", b"")
    with sessions_of(url) as sessions, sessions.begin() as session:
        savepoint = session.begin_nested()
        bill(session, message)
        savepoint.rollback()
        bill(session, message)
        bill(session, message)
    assert effects(url) == ["orders"]


def in_guard_by_order(session: Session, message: Message) -> None:
    with guard(session, by_order(message), consumer="billing"):
        session.execute(EFFECT, {"what": "done"})
        if message.payload == b"bad":
            raise ValueError("broken")


def adding(session: Session, message: Message) -> None:
    with guard(session, message.id, consumer="billing"):
        pillarbox.add(session, Message("bill", message.payload))
        if message.payload == b"bad":
            raise ValueError("broken")


def twice_nested(session: Session, message: Message) -> None:
    with session.begin_nested():
        in_function(session, message)


DONE = """
SELECT (SELECT count(*) FROM effect) + (SELECT count(*) FROM outbox.message),
       (SELECT count(*) FROM inbox.receipt)
         + (SELECT count(*) FROM inbox.foreign_receipt)
"""
HELPERS = [
    pytest.param(helper, id=helper.__name__)
    for helper in (in_guard, in_function, in_guard_by_order, adding, twice_nested)
]
PAYLOADS = [b"1", b"bad", b"2", b"bad", b"3"]


def each_in_a_savepoint(session: Session, handle: Any) -> list[Message]:
    """Handle a message in each savepoint; return those that were rolled back."""
    refused = []
    for message in [Message("orders", payload) for payload in PAYLOADS]:
        try:
            with session.begin_nested():
                handle(session, message)
        except ValueError:
            refused.append(message)
    return refused


async def each_in_an_async_savepoint(
    session: AsyncSession, handle: Any
) -> list[Message]:
    refused = []
    for message in [Message("orders", payload) for payload in PAYLOADS]:
        try:
            async with session.begin_nested():
                await session.run_sync(handle, message)
        except ValueError:
            refused.append(message)
    return refused


@pytest.mark.parametrize(("driver", "handle"), in_turn(DRIVERS, HELPERS))
async def test_a_receipt_is_rolled_back_with_its_savepoint(
    driver: str, handle: Any, url: str
) -> None:
    refused: list[Message] = []
    async with sessions_by(url, driver) as sessions:
        if is_plain(driver):
            with sessions.begin() as session:
                refused += each_in_a_savepoint(session, handle)
        else:
            async with sessions.begin() as session:
                refused += await each_in_an_async_savepoint(session, handle)
    assert len(refused) == 2
    assert execute(url, DONE) == [(3, 3)]


@pytest.mark.parametrize("call", [each_in_a_savepoint, each_in_an_async_savepoint])
@pytest.mark.parametrize("terms", [{}, {"batch": 2}], ids=str)
async def test_a_helpers_receipt_is_rolled_back_with_its_savepoint_in_a_handler(
    terms: dict[str, Any], call: Any, url: str
) -> None:
    def handle(session: Session, _: Any) -> None:
        call(session, mail_or_fail)

    async def handle_async(session: AsyncSession, _: Any) -> None:
        await call(session, mail_or_fail)

    @idempotent(consumer="mail")
    def mail_or_fail(session: Session, message: Message) -> None:
        session.execute(EFFECT, {"what": "mail"})
        if message.payload == b"bad":
            raise ValueError("broken")

    handler = handle if call is each_in_a_savepoint else handle_async
    async with consuming(url, MemorySource(Message("a", b"")), handler, terms) as seen:
        await seen.wait_for(MessageHandled)
    assert execute(url, DONE) == [(3, 4)]


def test_a_receipt_is_rolled_back_with_the_savepoint_of_a_session_in_a_transaction(
    url: str,
) -> None:
    first, second = numbered(2)
    with sessions_of(url) as sessions, sessions.kw["bind"].begin() as connection:
        session = Session(connection, join_transaction_mode="create_savepoint")
        bill(session, first)
        session.commit()
        bill(session, second)
        session.rollback()
    assert execute(url, DONE) == [(1, 1)]


@pytest.mark.parametrize("end", ["rollback", "commit"])
def test_the_savepoint_around_a_guard_cant_end_in_it(end: str, url: str) -> None:
    def end_it(session: Session) -> None:
        savepoint = session.begin_nested()
        with guard(session, uuid7(), consumer="billing"):
            getattr(savepoint, end)()
            session.execute(EFFECT, {"what": "done"})

    with (
        sessions_of(url) as sessions,
        pytest.raises(HandlerTransactionError, match="savepoint around the receipt"),
        sessions.begin() as session,
    ):
        end_it(session)
    assert execute(url, DONE) == [(0, 0)]


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_savepoint_left_open_in_a_guard_cant_be_rolled_back_after_it(
    driver: str, url: str
) -> None:
    def roll_back_later(session: Session) -> None:
        with session.begin_nested(), guard(session, uuid7(), consumer="billing"):
            savepoint = session.begin_nested()
            session.execute(EFFECT, {"what": "done"})
        savepoint.rollback()

    async with sessions_by(url, driver) as sessions:
        if is_plain(driver):
            with pytest.raises(ResourceClosedError), sessions.begin() as session:
                roll_back_later(session)
        else:
            async with sessions() as session:
                with pytest.raises(ResourceClosedError):
                    await session.run_sync(roll_back_later)
    assert execute(url, DONE) == [(0, 0)]
