"""The guard as a context manager, in sync and async sessions."""

import asyncio

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import async_scoped_session

from inbox.errors import InvalidReceiptError
from inbox.receipt import ForeignId
from outbox.errors import NotASessionError
from pillarbox import guard, uuid7
from tests.fixtures.consumers import async_sessions_of, sessions_of
from tests.fixtures.sessions import execute

EFFECT = text("INSERT INTO effect VALUES (:what)")


@pytest.fixture
def url(database_url: str) -> str:
    execute(database_url, "CREATE TABLE effect (what text)")
    return database_url


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
    assert seen == [True, False, False, True]


async def test_a_scoped_session_is_accepted(url: str) -> None:
    id = uuid7()
    seen = []
    async with async_sessions_of(url) as sessions:
        for _ in range(2):
            scoped = async_scoped_session(sessions, scopefunc=asyncio.current_task)
            async with scoped.begin(), guard(scoped, id, consumer="a") as is_new:
                seen.append(is_new)
            await scoped.remove()
    assert seen == [True, False]


def test_a_failure_inside_leaves_neither_receipt_nor_effect(url: str) -> None:
    id = uuid7()

    def handle(*, fail: bool) -> bool:
        with (
            sessions_of(url) as sessions,
            sessions.begin() as session,
            guard(session, id, consumer="a") as is_new,
        ):
            session.execute(EFFECT, {"what": "done"})
            if fail:
                raise ValueError("broken")
        return is_new

    with pytest.raises(ValueError, match="broken"):
        handle(fail=True)
    assert execute(url, "SELECT * FROM effect") == []
    assert handle(fail=False)
    assert execute(url, "SELECT * FROM effect") == [("done",)]


async def test_an_async_session_is_refused_by_sync_code_and_vice_versa(
    url: str,
) -> None:
    async with async_sessions_of(url) as sessions, sessions() as session:
        with pytest.raises(NotASessionError), guard(session, uuid7(), consumer="a"):
            pass


def test_a_consumer_without_name_is_refused(url: str) -> None:
    with (
        sessions_of(url) as sessions,
        sessions() as session,
        pytest.raises(InvalidReceiptError, match="consumer"),
    ):
        guard(session, uuid7(), consumer="")


def test_the_error_for_an_id_in_a_string_says_which_type_to_use(url: str) -> None:
    with (
        sessions_of(url) as sessions,
        sessions() as session,
        pytest.raises(InvalidReceiptError, match=r"is a str; pass uuid\.UUID\(…\)"),
        guard(session, str(uuid7()), consumer="a"),  # type: ignore[arg-type]
    ):
        pass
