"""The page's transactions, each in a session of its own, and only a few at a time."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import psycopg
from starlette.exceptions import HTTPException
from starlette.requests import Request

from pillarbox.outbox.administration.connection import (
    AdministrationConnection,
    NotingCursor,
    errors_explained,
)
from pillarbox.outbox.errors import UpkeepError
from pillarbox.outbox.postgres.connection import PIN_SESSION, conninfo
from pillarbox.outbox.postgres.pooler_check import refuse_pooler

APPLICATION_NAME: Final = "pillarbox web"
"""The application_name of the page's sessions in `pg_stat_activity`."""
RIGHTS: Final = (
    "GRANT pillarbox_web TO the page's role; pillarbox_monitor is enough to read"
)

_MOST: Final = 4
_SETTINGS: Final = (
    f"{PIN_SESSION}; SET statement_timeout = '10s'; SET lock_timeout = '2s'"
    "; SET idle_in_transaction_session_timeout = '30s'"
    # JIT-compiling a plan for many partitions would take seconds.
    "; SET jit = off"
)

T = TypeVar("T")


class Database:
    """Runs transactions for the page, at most four at a time. For one event loop.

    Args:
        read_only: whether PostgreSQL rejects every change.
    """

    def __init__(self, url: str, *, read_only: bool) -> None:
        self.url = url
        self._settings = (
            f"{_SETTINGS}; SET default_transaction_read_only = "
            f"{'on' if read_only else 'off'}"
        )
        self._turns = asyncio.Semaphore(_MOST)
        self._is_direct = False

    async def run(
        self,
        function: Callable[[AdministrationConnection], T],
        reads_for: Request | None = None,
    ) -> T:
        """Call a function in a thread, in one transaction.

        Args:
            reads_for: the request that it only reads for: if its client is gone when
                its turn comes, nothing is read.

        Raises:
            DatabaseUnavailableError: the database is unreachable, or the connection was
                lost.
            PoolerError: the URL leads to a pooler in transaction mode.
            UpkeepError: a statement failed; the message names the remedy.
        """
        async with self._turns:
            if (it := reads_for) is not None and (
                await it.is_disconnected()  # or there was a body, which comes first
                or await it.is_disconnected()
            ):
                raise HTTPException(408)
            return await asyncio.to_thread(self._run, function)

    def _run(self, function: Callable[[AdministrationConnection], T]) -> T:
        with self.transaction() as connection:
            return function(connection)

    @contextmanager
    def transaction(self) -> Iterator[AdministrationConnection]:
        """Open a transaction for the block, in this thread."""
        if not self._is_direct:
            refuse_pooler(self.url)
            self._is_direct = True
        address = conninfo(self.url, application_name=APPLICATION_NAME)
        with (
            errors_explained(self.url, RIGHTS),
            psycopg.connect(
                address, autocommit=True, cursor_factory=NotingCursor
            ) as connection,
        ):
            connection.execute(self._settings.encode())
            try:
                with connection.transaction():
                    yield connection
            except psycopg.errors.QueryCanceled as error:
                raise UpkeepError(
                    "the database took longer than 10 s; choose a shorter time or more "
                    "filters"
                ) from error
