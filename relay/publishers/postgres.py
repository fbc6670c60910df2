"""A publisher that appends to the outbox of another database, for consumers there.

A batch is inserted by one statement in one transaction, so all of it arrives or nothing
does. Messages that the outbox already has are skipped: those that an earlier call
inserted although its answer was lost, and those that came from there, so relays can't
loop.
"""

import asyncio
import json
import math
from collections.abc import Sequence
from typing import Any, Final, Self

import psycopg

from pillarbox.outbox.brokers.postgres import PostgresOptions
from pillarbox.outbox.errors import (
    BrokerRefusedError,
    BrokerUnavailableError,
    ConfigError,
    DatabaseRefusedError,
    DatabaseUnavailableError,
    PrerequisiteError,
    message_of,
)
from pillarbox.outbox.lane import lane_of
from pillarbox.outbox.message import Message
from pillarbox.outbox.message_id import seconds_since_epoch
from pillarbox.outbox.postgres.connection import Link, conninfo
from pillarbox.outbox.postgres.identity import identify_outbox
from pillarbox.outbox.postgres.pooler_check import refuse_pooler_async
from pillarbox.outbox.postgres.remedy import remedy_of
from pillarbox.outbox.postgres.sql_files import load
from pillarbox.outbox.url import without_password
from pillarbox.relay.publisher import Acked, Confirmation, Nacked, nack_too_large

SETTINGS: Final = {
    # A plan that was made while the day was empty would read all of it.
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}
_GRANT: Final = (
    "in that database, run GRANT pillarbox_application TO its user; if it has that"
    " already, run pillarbox migrate"
)
_encode = json.JSONEncoder(ensure_ascii=False).encode


class PostgresPublisher:
    """Appends messages to the outbox of a database, with their ids, keys and headers.

    Args:
        url: the URL of the database, with the options of `PostgresOptions` and of
            libpq.

    Attributes:
        appends_to: see `Appending`.

    Raises:
        ConfigError: the URL can't be used.
    """

    in_database = True

    def __init__(self, url: str) -> None:
        given = url
        url, options = PostgresOptions.parse(url)
        conninfo(url)
        self.identity = PostgresOptions.identity(given)
        self.appends_to: str | None = None
        self._url = url
        self._name = without_password(url)
        self._max_payload_bytes = options.max_payload_bytes
        self._link = Link(
            url,
            application_name="pillarbox publisher",
            settings=SETTINGS,
            answer_limit=math.inf,  # the relay has limits for the size of a batch
        )
        self._turn = asyncio.Lock()
        self._entered = False

    async def __aenter__(self) -> Self:
        """Connect, and check that the tables exist.

        Raises:
            BrokerUnavailableError: the database is unreachable or read-only.
            ConfigError: the table or the privilege to insert into it is missing, or the
                connection leads through a pooler in transaction mode.
        """
        try:
            await self._enter()
        except BaseException:
            await self._link.close()
            raise
        self._entered = True
        return self

    async def _enter(self) -> None:
        try:
            await refuse_pooler_async(self._url)
            await self._insert([])
            self.appends_to = await identify_outbox(await self._link.connection())
        except DatabaseRefusedError as error:
            raise BrokerRefusedError(str(self._away(error))) from error
        except DatabaseUnavailableError as error:
            raise self._away(error) from error
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
            raise PrerequisiteError(
                f"broker {self._name} lacks pillarbox's tables: run pillarbox migrate"
                " --database URL for it"
            ) from None
        except psycopg.errors.InsufficientPrivilege as error:
            raise ConfigError(
                f"broker {self._name}: {message_of(error)}; {remedy_of(error, _GRANT)}"
            ) from None

    async def __aexit__(self, *exc_info: object) -> None:
        """Disconnect."""
        self._entered = False
        await self._link.close()

    async def check(self) -> None:
        """Insert an empty batch, as on entering.

        Raises:
            BrokerUnavailableError: the connection broke or can't be opened, or the
                database accepts no writes.
        """
        try:
            await self._insert([])
        except psycopg.ProgrammingError as error:
            raise self._away(error) from error

    async def publish(self, batch: Sequence[Message]) -> Sequence[Confirmation]:
        """Insert a batch, in order.

        Raises:
            BrokerUnavailableError: the connection broke, the table has no partition for
                today, the database accepts no writes, or the publisher is not open.
                The next call reconnects.
        """
        if not self._entered:
            raise BrokerUnavailableError(
                "broker postgres: the publisher is not open; use `async with`"
            )
        limit = self._max_payload_bytes
        too_large = [nack_too_large(message.payload, limit) for message in batch]
        sound = [it for it, nack in zip(batch, too_large, strict=True) if nack is None]
        try:
            if sound:
                await self._insert(sound)
        except (
            psycopg.DataError,
            psycopg.errors.CheckViolation,
            psycopg.errors.ProgramLimitExceeded,
        ) as error:
            if len(batch) > 1:
                # The other messages must not be charged for a value that can't be
                # stored.
                return [(await self.publish([message]))[0] for message in batch]
            return [
                Nacked(f"PostgreSQL refused it: {message_of(error)}", permanent=True)
            ]
        except psycopg.ProgrammingError as error:
            # A missing table or privilege affects every message.
            raise self._away(error) from error
        return [nack or Acked() for nack in too_large]

    def _away(self, error: Exception) -> BrokerUnavailableError:
        return BrokerUnavailableError(
            f"{self._name}: {message_of(error)}; {remedy_of(error)}"
        )

    async def _insert(self, batch: Sequence[Message]) -> None:
        async with self._turn:
            try:
                connection = await self._link.connection()
                await connection.execute(load("relay", "append_messages"), rows(batch))
            except psycopg.errors.ProgramLimitExceeded:
                raise  # an OperationalError, but caused by one indexed value
            except (
                DatabaseUnavailableError,
                psycopg.OperationalError,
                psycopg.InterfaceError,
                psycopg.InternalError,  # for example a standby, which accepts no writes
            ) as error:
                raise self._away(error) from error
            except psycopg.errors.CheckViolation as error:
                if error.diag.constraint_name is not None:
                    raise
                # Today's partition is missing.
                raise BrokerUnavailableError(
                    f"{self._name}: {message_of(error)}; run pillarbox maintain for it"
                ) from error


def rows(batch: Sequence[Message]) -> dict[str, Any]:
    """Return the parameters that append messages."""
    return {
        "since": min((seconds_since_epoch(m.id) or 0 for m in batch), default=0),
        "ids": [m.id for m in batch],
        "lanes": [lane_of(m.key, m.id, m.priority) for m in batch],
        "schema_versions": [m.schema_version for m in batch],
        "topics": [m.topic for m in batch],
        "keys": [m.key for m in batch],
        "tenants": [m.tenant for m in batch],
        "content_types": [m.content_type for m in batch],
        "headers": [_encode(m.headers) for m in batch],
        "payloads": [m.payload for m in batch],
    }
