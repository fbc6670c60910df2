"""Messages that a session never sent are reported, except after a rollback or error."""

import asyncio
import gc
import logging
import subprocess
import sys
import warnings
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
)
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import outbox
from outbox import Message, unsent
from outbox.testing import added
from outbox.unsent import MessagesUnsent, UnsentMessagesWarning

pytestmark = pytest.mark.pillarbox_allow_unsent

ORDER = Message("orders.placed", {"order": 1})
REFUND = Message("refunds.made", {"order": 1})
CLOSED = MessagesUnsent(
    messages=3,
    topics=("orders.placed", "refunds.made"),
    reason="their session was closed",
)
COLLECTED = MessagesUnsent(
    messages=1,
    topics=("orders.placed",),
    reason="their session was garbage-collected",
)


@pytest.fixture
def reported() -> Iterator[list[MessagesUnsent]]:
    reported: list[MessagesUnsent] = []
    listener = reported.append
    unsent.on_unsent.append(listener)
    yield reported
    unsent.on_unsent.remove(listener)


def test_a_session_that_is_closed_without_a_commit_is_reported(
    reported: list[MessagesUnsent],
) -> None:
    with Session() as session:
        outbox.add(session, ORDER, REFUND)
        outbox.add(session, ORDER)

    assert reported == [CLOSED]


async def test_an_async_session_that_is_closed_without_a_commit_is_reported(
    reported: list[MessagesUnsent],
) -> None:
    async with AsyncSession() as session:
        outbox.add(session, ORDER, REFUND)
        outbox.add(session, ORDER)

    assert reported == [CLOSED]


async def test_scoped_sessions_are_reported_when_they_are_removed(
    reported: list[MessagesUnsent],
) -> None:
    scoped = scoped_session(sessionmaker())
    async_scoped = async_scoped_session(async_sessionmaker(), scopefunc=lambda: 1)
    outbox.add(scoped, ORDER)
    outbox.add(async_scoped, REFUND)

    scoped.remove()
    await async_scoped.remove()

    assert [one.topics for one in reported] == [("orders.placed",), ("refunds.made",)]


def test_a_session_that_is_collected_is_reported(
    reported: list[MessagesUnsent],
) -> None:
    def handle() -> None:
        outbox.add(Session(), ORDER)

    handle()
    gc.collect()

    assert reported == [COLLECTED]


async def test_an_async_session_that_is_collected_is_reported(
    reported: list[MessagesUnsent],
) -> None:
    async def handle() -> None:
        outbox.add(AsyncSession(), ORDER)

    await handle()
    gc.collect()

    assert reported == [COLLECTED]


def test_a_session_that_is_used_again_after_a_close_is_reported_each_time(
    reported: list[MessagesUnsent],
) -> None:
    session = Session()
    for _ in range(2):
        outbox.add(session, ORDER)
        session.close()

    assert len(reported) == 2


def test_a_rollback_is_not_reported_as_a_loss(reported: list[MessagesUnsent]) -> None:
    with Session() as session:
        outbox.add(session, ORDER)
        session.rollback()
    with sessionmaker().begin() as session:
        outbox.add(session, ORDER)
        session.rollback()
    gc.collect()

    assert reported == []


async def test_a_rollback_of_an_async_session_is_not_reported_as_a_loss(
    reported: list[MessagesUnsent],
) -> None:
    async with AsyncSession() as session:
        outbox.add(session, ORDER)
        await session.rollback()

    assert reported == []


def close_in_finally(session: Session) -> None:
    try:
        add_and_fail(session)
    finally:
        session.close()


def leave_block(session: Session) -> None:
    with session:
        add_and_fail(session)


def leave_transaction(session: Session) -> None:
    with session, session.begin():
        add_and_fail(session)


async def close_in_finally_async(session: AsyncSession) -> None:
    try:
        add_and_fail(session)
    finally:
        await session.close()


async def leave_block_async(session: AsyncSession) -> None:
    async with session:
        add_and_fail(session)


async def leave_transaction_async(session: AsyncSession) -> None:
    async with session, session.begin():
        add_and_fail(session)


async def leave_generator_async(session: AsyncSession) -> None:
    @asynccontextmanager
    async def give() -> AsyncIterator[AsyncSession]:
        async with session:
            yield session

    async with give() as given:
        add_and_fail(given)


def add_and_fail(session: Session | AsyncSession) -> None:
    outbox.add(session, ORDER)
    raise ZeroDivisionError


@pytest.mark.parametrize("leave", [close_in_finally, leave_block, leave_transaction])
def test_an_exception_is_not_reported_as_a_loss(
    leave: Callable[[Session], None], reported: list[MessagesUnsent]
) -> None:
    with pytest.raises(ZeroDivisionError):
        leave(Session())

    assert reported == []


@pytest.mark.parametrize(
    "leave",
    [
        close_in_finally_async,
        leave_block_async,
        leave_transaction_async,
        leave_generator_async,
    ],
)
async def test_an_exception_around_an_async_session_is_not_reported_as_a_loss(
    leave: Callable[[AsyncSession], Awaitable[None]], reported: list[MessagesUnsent]
) -> None:
    with pytest.raises(ZeroDivisionError):
        await leave(AsyncSession())

    assert reported == []


async def test_a_cancelled_task_is_not_reported_as_a_loss(
    reported: list[MessagesUnsent],
) -> None:
    is_added = asyncio.Event()

    async def handle() -> None:
        async with AsyncSession() as session:
            outbox.add(session, ORDER)
            is_added.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(handle())
    await is_added.wait()
    task.cancel()
    await asyncio.wait({task})

    assert reported == []


def test_an_earlier_handled_exception_hides_no_loss(
    reported: list[MessagesUnsent],
) -> None:
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        with Session() as session:
            outbox.add(session, ORDER)

    assert len(reported) == 1


async def test_an_earlier_handled_exception_hides_no_loss_async(
    reported: list[MessagesUnsent],
) -> None:
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        async with AsyncSession() as session:
            outbox.add(session, ORDER)

    assert len(reported) == 1


def test_expunged_messages_are_not_reported_as_a_loss(
    reported: list[MessagesUnsent],
) -> None:
    with Session() as session:
        outbox.add(session, ORDER)
        session.expunge_all()

    assert reported == []


@pytest.mark.parametrize("expunge", ["one", "all"])
def test_messages_that_were_expunged_before_a_commit_are_reported(
    expunge: str, reported: list[MessagesUnsent]
) -> None:
    with Session() as session:
        outbox.add(session, ORDER)
        if expunge == "all":
            session.expunge_all()
        else:
            (waiting,) = session.new
            session.expunge(waiting)
        outbox.add(session, REFUND)
        session.expunge_all()
        session.commit()
        session.commit()

    (lost,) = reported
    assert lost.topics == ("orders.placed", "refunds.made")
    assert str(lost).endswith(
        "their session expunged them, and was committed; flush the session before you "
        "expunge objects"
    )


@pytest.mark.parametrize("end", [Session.rollback, Session.close])
def test_messages_that_were_expunged_before_a_rollback_are_not_reported(
    end: Callable[[Session], None], reported: list[MessagesUnsent]
) -> None:
    with Session() as session:
        outbox.add(session, ORDER)
        session.expunge_all()
        end(session)
        session.begin()
        session.commit()

    assert reported == []


def sessions_of_a_generator() -> Iterator[Session]:
    with Session() as session:
        yield session


async def sessions_of_an_async_generator() -> AsyncGenerator[AsyncSession, None]:
    async with AsyncSession() as session:
        yield session


def leave_loop() -> None:
    for session in sessions_of_a_generator():
        outbox.add(session, ORDER)
        break


def close_generator() -> None:
    generator: Any = sessions_of_a_generator()
    outbox.add(next(generator), ORDER)
    generator.close()


def forget_generator() -> None:
    generator = sessions_of_a_generator()
    outbox.add(next(generator), ORDER)


@pytest.mark.parametrize("leave", [leave_loop, close_generator, forget_generator])
def test_a_generator_that_is_left_before_its_end_is_reported(
    leave: Callable[[], None], reported: list[MessagesUnsent]
) -> None:
    leave()
    gc.collect()

    assert [one.reason for one in reported] == ["their session was closed"]


async def leave_loop_async() -> None:
    async for session in sessions_of_an_async_generator():
        outbox.add(session, ORDER)
        break


async def close_generator_async() -> None:
    generator = sessions_of_an_async_generator()
    outbox.add(await anext(generator), ORDER)
    await generator.aclose()


@pytest.mark.parametrize("leave", [leave_loop_async, close_generator_async])
def test_an_async_generator_that_is_left_before_its_end_is_reported(
    leave: Callable[[], Coroutine[Any, Any, None]], reported: list[MessagesUnsent]
) -> None:
    asyncio.run(leave())

    assert [one.reason for one in reported] == ["their session was closed"]


def test_a_generator_that_is_closed_by_an_exception_is_not_reported(
    reported: list[MessagesUnsent],
) -> None:
    generator: Any = sessions_of_a_generator()
    with pytest.raises(ZeroDivisionError), closing(generator):
        add_and_fail(next(generator))

    assert reported == []


async def test_a_dependency_that_ends_by_an_exception_is_not_reported(
    reported: list[MessagesUnsent],
) -> None:
    give = asynccontextmanager(sessions_of_an_async_generator)
    with pytest.raises(ZeroDivisionError):
        async with give() as session:
            add_and_fail(session)

    assert reported == []


@pytest.mark.parametrize(
    ("status", "is_reported"), [(0, True), (None, True), (1, False)]
)
def test_an_exit_without_an_error_hides_no_loss(
    status: int | None, is_reported: bool, reported: list[MessagesUnsent]
) -> None:
    def run() -> None:
        with Session() as session:
            outbox.add(session, ORDER)
            sys.exit(status)

    with pytest.raises(SystemExit):
        run()

    assert bool(reported) == is_reported


def test_messages_that_a_test_read_are_not_reported_as_a_loss(
    reported: list[MessagesUnsent],
) -> None:
    with Session() as session:
        outbox.add(session, ORDER)
        assert added(session) == [ORDER]

    assert reported == []


def test_a_loss_is_logged_and_warned_about_with_topic_and_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(unsent, "on_unsent", [])

    with (
        caplog.at_level(logging.WARNING, "pillarbox"),
        pytest.warns(UnsentMessagesWarning, match="of topic 'orders.placed': their"),
        Session() as session,
    ):
        outbox.add(session, ORDER)

    (record,) = caplog.records
    assert (record.name, record.levelname) == ("pillarbox", "WARNING")
    assert record.getMessage() == (
        "MessagesUnsent messages=1 topics=('orders.placed',) reason='their session was"
        " closed' remedy='flush and commit the session that outbox.add was given, or"
        " roll it back on purpose'"
    )
    assert record.__dict__["event"] == "MessagesUnsent"
    assert record.__dict__["values"]["topics"] == ("orders.placed",)


def test_a_session_closes_even_if_warnings_are_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unsent, "on_unsent", [])
    raised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)

    with warnings.catch_warnings(), Session() as session:
        warnings.simplefilter("error")
        outbox.add(session, ORDER)
        session.close()

    assert not session.in_transaction()
    assert [one.exc_type for one in raised] == [UnsentMessagesWarning]


SCRIPT = """
from sqlalchemy.orm import Session
import outbox
session = Session()
outbox.add(session, outbox.Message("orders.placed", b""))
"""


@pytest.mark.parametrize(
    ("end", "is_reported"),
    [("", True), ("session.rollback()", False), ("1 / 0", False)],
)
def test_a_script_that_forgets_to_commit_is_warned_at_exit(
    end: str, is_reported: bool
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + end],
        capture_output=True,
        text=True,
        check=False,
    )

    said = (
        "MessagesUnsent messages=1 topics=('orders.placed',) reason='the process ended'"
    )
    assert (said in done.stderr) == is_reported
