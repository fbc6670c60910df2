"""A publisher that inserts into `inbox.message`: PostgreSQL as the broker.

The URL's database can be that of the outbox or a different one. A batch is inserted by
one statement in one transaction, so all of it arrives or nothing does.
"""

import asyncio
import json
import math
from collections.abc import Sequence
from typing import Any, Self

import psycopg

from outbox.brokers.postgres import PostgresOptions
from outbox.errors import (
    BrokerUnavailableError,
    ConfigError,
    DatabaseUnavailableError,
    message_of,
    shorten,
)
from outbox.lane import bucket_of
from outbox.logs.printable import for_shell
from outbox.message import Message
from outbox.postgres.connection import Link, conninfo
from outbox.postgres.pooler_check import refuse_pooler_async
from outbox.postgres.remedy import remedy_of
from outbox.postgres.sql_files import load
from outbox.url import without_password
from relay.publisher import Acked, Confirmation, Nacked, nack_too_large

_encode = json.JSONEncoder(ensure_ascii=False).encode


class PostgresPublisher:
    """Publishes to every consumer that subscribes to the topic.

    Args:
        url: the URL of the database with the schema `inbox`, with the options of
            `PostgresOptions` and of libpq.

    Raises:
        ConfigError: the URL can't be used.
    """

    in_database = True

    def __init__(self, url: str) -> None:
        url, options = PostgresOptions.parse(url)
        conninfo(url)
        if options.direct:
            raise ConfigError(
                "direct=true is for consumers, which read the outbox without a relay"
            )
        self.identity = PostgresOptions.identity(url)
        self._url = url
        self._name = without_password(url)
        self._drop_unsubscribed = options.unsubscribed == "drop"
        self._max_payload_bytes = options.max_payload_bytes
        self._link = Link(
            url,
            application_name="pillarbox publisher",
            answer_limit=math.inf,  # the relay has limits for the size of a batch
        )
        self._turn = asyncio.Lock()
        self._entered = False

    async def __aenter__(self) -> Self:
        """Connect, and check that the tables exist.

        Raises:
            BrokerUnavailableError: the database is unreachable or read-only.
            ConfigError: the table `inbox.message` or the privilege to insert into it
                is missing, or the connection leads through a pooler in transaction
                mode.
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
        except DatabaseUnavailableError as error:
            raise self._away(error) from error
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
            raise ConfigError(
                f"broker {self._name} has no table inbox.message: run pillarbox "
                "migrate --database URL for it"
            ) from None
        except psycopg.errors.InsufficientPrivilege as error:
            raise ConfigError(
                f"broker {self._name}: {message_of(error)}; "
                + remedy_of(error, "grant the role pillarbox_relay to its user")
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

        A message whose topic has no subscribers is nacked, so that it stays visible in
        the outbox. A later attempt succeeds once a consumer subscribes.

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
            unsubscribed = await self._insert(sound) if sound else set()
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
        return [
            nack or self._confirmation(message, unsubscribed)
            for message, nack in zip(batch, too_large, strict=True)
        ]

    def _away(self, error: Exception) -> BrokerUnavailableError:
        return BrokerUnavailableError(
            f"{self._name}: {message_of(error)}; {remedy_of(error)}"
        )

    def _confirmation(self, message: Message, unsubscribed: set[str]) -> Confirmation:
        if message.topic not in unsubscribed or self._drop_unsubscribed:
            return Acked()
        return Nacked(
            f"nobody subscribes to topic {shorten(message.topic)}; "
            f"run pillarbox subscribe CONSUMER {for_shell(message.topic)}"
        )

    async def _insert(self, batch: Sequence[Message]) -> set[str]:
        async with self._turn:
            try:
                connection = await self._link.connection()
                cursor = await connection.execute(
                    load("relay", "insert_messages"), _arrays(batch)
                )
                return {topic for (topic,) in await cursor.fetchall()}
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


def _arrays(batch: Sequence[Message]) -> dict[str, list[Any]]:
    return {
        "ids": [m.id for m in batch],
        "lanes": [bucket_of(m.key, m.id) for m in batch],
        "schema_versions": [m.schema_version for m in batch],
        "topics": [m.topic for m in batch],
        "keys": [m.key for m in batch],
        "tenants": [m.tenant for m in batch],
        "content_types": [m.content_type for m in batch],
        "headers": [_encode(m.headers) for m in batch],
        "payloads": [m.payload for m in batch],
    }
