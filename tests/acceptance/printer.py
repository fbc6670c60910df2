"""Consumers with a long handler, which prints pages while there is paper.

Each page is an effect in its own transaction; the report is one in the last.
"""

import logging
import os
from datetime import timedelta
from typing import Any, Final

from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from pillarbox import Consumer
from pillarbox.inbox.errors import JobLostError
from pillarbox.inbox.jobs.job import AnyJob, AsyncJob, Job
from pillarbox.outbox.message import Message
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from pillarbox.outbox.retry import RetryPolicy
from tests.fixtures.waiting import answer_after, let_pass

NAME: Final = "printer"
TOPIC: Final = "reports.requested"
PAGES: Final = 6
TABLES: Final = """
    CREATE TABLE paper (sheets int);
    CREATE TABLE page (number int, pid int);
    CREATE TABLE report (pid int);
    INSERT INTO paper VALUES (0);
    GRANT SELECT, INSERT ON paper, page, report TO pillarbox_consumer;
"""
LEASE: Final = timedelta(seconds=3)
_POLL: Final = 0.02
_SHEETS: Final = text("SELECT sheets FROM paper")
_PRINT: Final = text("INSERT INTO page VALUES (:number, :pid)")
_REPORT: Final = text("INSERT INTO report VALUES (:pid)")
_PID: Final = {"pid": os.getpid()}


def printer() -> Consumer:
    """Create a consumer whose handler is a coroutine, which is simply cancelled."""
    consumer = _consumer(async_sessionmaker(create_async_engine(_url())))

    @consumer.job(TOPIC, lease=LEASE)
    async def print_report(job: AsyncJob, message: Message) -> None:
        for number in _pages(job):
            while await _sheets(job) <= number:
                await answer_after(_POLL)
            async with job.transaction() as session:
                await session.execute(_PRINT, {"number": number, **_PID})
            await job.save(number + 1)
        async with job.finish() as session:
            await session.execute(_REPORT, _PID)

    return consumer


def stubborn() -> Consumer:
    """Create a consumer whose handler never checks whether it was cancelled.

    It waits for paper with the page in an open transaction.
    """
    consumer = _consumer(
        sessionmaker(create_engine(_url())), max_idle=timedelta(minutes=5)
    )

    @consumer.job(TOPIC, lease=LEASE)
    def print_report(job: Job, message: Message) -> None:
        try:
            for number in _pages(job):
                with job.transaction() as session:
                    session.execute(_PRINT, {"number": number, **_PID})
                    while session.scalars(_SHEETS).one() <= number:
                        let_pass(_POLL)
                job.save(number + 1)
            with job.finish() as session:
                session.execute(_REPORT, _PID)
        except JobLostError as error:
            logging.getLogger("pillarbox").warning("told: %r", error)
            raise

    return consumer


def _consumer(sessions: Any, **options: Any) -> Consumer:
    return Consumer(
        os.environ["PILLARBOX_BROKER_URL"],
        sessions,
        name=NAME,
        retry=RetryPolicy(first_delay=timedelta(milliseconds=50)),
        **options,
    )


def _url() -> str:
    return sqlalchemy_url(os.environ["PILLARBOX_DATABASE_URL"])


def _pages(job: AnyJob) -> range:
    return range(job.checkpoint or 0, PAGES)


async def _sheets(job: AsyncJob) -> int:
    async with job.transaction() as session:
        return int((await session.scalars(_SHEETS)).one())
