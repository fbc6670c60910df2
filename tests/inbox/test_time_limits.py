"""After a handler's time limit nothing commits, and the attempt counts."""

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from pillarbox import DeadLetter, Message, RetryLater
from pillarbox.inbox.events import (
    HandlerDatabaseLost,
    HandlerFailed,
    MessageDeadLettered,
    RetryRequested,
)
from pillarbox.inbox.jobs.job import AsyncJob, Job
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.retry import RetryPolicy
from tests.fixtures.consumers import DRIVERS, POOLS, consuming, is_plain, numbered
from tests.fixtures.effects import effects, receipts
from tests.fixtures.jobs import LEASE
from tests.fixtures.sessions import execute
from tests.fixtures.variants import in_turn
from tests.fixtures.waiting import let_pass, wait_for

LIMIT = timedelta(milliseconds=20)
TWICE = RetryPolicy(max_attempts=2, first_delay=timedelta(milliseconds=1))
INSERT = "INSERT INTO effect VALUES ('late')"


def statement(driver: str) -> Any:
    return INSERT if driver in POOLS else text(INSERT)


async def outlive_the_limit() -> None:
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()


async def block_the_loop() -> None:
    let_pass(2 * LIMIT.total_seconds())


async def ask_for_a_retry() -> None:
    await outlive_the_limit()
    raise RetryLater(timedelta(0))


async def cancel_in_a_group() -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError as error:
        raise BaseExceptionGroup("gathered", [error, ValueError()]) from None


LATE = [
    pytest.param(way, id=way.__name__)
    for way in (outlive_the_limit, block_the_loop, ask_for_a_retry, cancel_in_a_group)
]
COROUTINES = [it for it in (*DRIVERS, *POOLS) if not is_plain(it)]
FUNCTIONS = [it for it in (*DRIVERS, *POOLS) if is_plain(it)]
TERMS: Any = [{}, {"batch": 2}]


@pytest.mark.parametrize(("late", "terms", "driver"), in_turn(LATE, TERMS, COROUTINES))
async def test_a_coroutine_that_goes_on_after_its_limit_commits_nothing(
    late: Any, terms: dict[str, Any], driver: str, url: str
) -> None:
    async def handle(session: Any, messages: Any) -> None:
        await session.execute(statement(driver))
        await late()
        await session.execute(statement(driver))

    source = MemorySource(*numbered(1))
    limited = {"time_limit": LIMIT, **terms}
    async with consuming(
        url, source, handle, limited, driver=driver, retry=TWICE
    ) as events:
        (given_up,) = await events.wait_for(MessageDeadLettered)
    assert given_up.attempts == 2
    assert "exceeded its time limit" in given_up.reason
    assert events.of(RetryRequested) == []
    assert (effects(url), receipts(url)) == ([], 0)


IDLE = """
    SELECT count(*) FROM pg_stat_activity
     WHERE datname = current_database() AND state = 'idle in transaction'
"""
TERMINATE = """
    SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
     WHERE datname = current_database() AND state = 'idle in transaction'
"""


@pytest.mark.parametrize(("driver", "terms"), in_turn(FUNCTIONS, TERMS))
async def test_each_call_of_a_function_that_loses_its_connection_after_its_limit_counts(
    terms: dict[str, Any], driver: str, url: str
) -> None:
    calls: list[int] = []

    def handle(session: Any, messages: Any) -> None:
        calls.append(len(calls))
        session.execute(statement(driver))
        wait_for("it is ended", lambda: execute(url, IDLE) == [(0,)])
        if len(calls) == 1:
            session.execute(statement(driver))

    source = MemorySource(*numbered(1))
    limited = {"time_limit": LIMIT, **terms}
    settings: Any = {"retry": TWICE, "max_idle": timedelta(seconds=1)}
    async with consuming(
        url, source, handle, limited, driver=driver, **settings
    ) as events:
        (given_up,) = await events.wait_for(MessageDeadLettered)
    assert len(calls) == given_up.attempts == 2
    for reason in (given_up.reason, events.of(HandlerFailed)[0].reason):
        assert "exceeded its time limit" in reason
    assert events.of(HandlerDatabaseLost) == []
    assert (effects(url), receipts(url)) == ([], 0)


@pytest.mark.parametrize(
    ("driver", "decision", "outcome", "finds"),
    in_turn(
        [*DRIVERS, *POOLS],
        [
            pytest.param(RetryLater(LIMIT, "busy"), RetryRequested, id="later"),
            pytest.param(DeadLetter("x"), MessageDeadLettered, id="dead"),
        ],
        ["rollback", "handler"],
    ),
)
async def test_a_decision_counts_though_the_rollback_or_it_finds_the_connection_lost(
    finds: str, decision: Exception, outcome: Any, driver: str, url: str
) -> None:
    def handle_in_thread(session: Any, messages: Any) -> None:
        session.execute(statement(driver))
        execute(url, TERMINATE)
        with suppress(Exception):
            if finds == "handler":
                session.execute(statement(driver))
        raise decision

    async def handle(session: Any, messages: Any) -> None:
        await session.execute(statement(driver))
        execute(url, TERMINATE)
        with suppress(Exception):
            if finds == "handler":
                await session.execute(statement(driver))
        raise decision

    handler: Any = handle_in_thread if is_plain(driver) else handle
    source = MemorySource(*numbered(1))
    async with consuming(url, source, handler, driver=driver, retry=TWICE) as events:
        await events.wait_for(outcome)
    assert events.of(HandlerFailed) == []
    assert effects(url) == []


async def test_a_job_that_goes_on_after_its_limit_commits_nothing_more(
    url: str,
) -> None:
    async def handle(job: AsyncJob, message: Message) -> None:
        async with job.transaction() as session:
            await session.execute(text(INSERT))
            await outlive_the_limit()
        async with job.transaction() as session:
            await session.execute(text(INSERT))

    await run_job(url, handle)


async def test_a_job_in_a_thread_begins_no_transaction_after_its_limit(
    url: str,
) -> None:
    def handle(job: Job, message: Message) -> None:
        wait_for("the limit passes", lambda: job.cancelled)
        with job.transaction() as session:
            session.execute(text(INSERT))

    await run_job(url, handle)


async def run_job(url: str, handle: Any) -> None:
    source = MemorySource(*numbered(1))
    terms = {"lease": LEASE, "time_limit": LIMIT}
    async with consuming(url, source, handle, terms, retry=TWICE) as events:
        (given_up,) = await events.wait_for(MessageDeadLettered)
    assert given_up.attempts == 2
    assert "exceeded its time limit" in given_up.reason
    assert effects(url) == []
