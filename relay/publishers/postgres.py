"""Publishes into `inbox.delivery`: PostgreSQL as the broker.

The database of the URL may be that of the outbox or another one. A batch is one
statement in one transaction, so it arrives as a whole or not at all.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Final, Self

import psycopg

from outbox.database import Link, conninfo
from outbox.errors import (
    BrokerUnavailableError,
    ConfigError,
    DatabaseUnavailableError,
    message_of,
    shorten,
)
from outbox.lane import bucket_of
from outbox.message import Message
from outbox.pooler import refuse_pooler_async
from outbox.statement import load
from outbox.url import take_options, without_password
from relay.publisher import Acked, Confirmation, Nacked

_OPTION: Final = "unsubscribed"
_CHOICES: Final = ("keep", "drop")
_encode = json.JSONEncoder(ensure_ascii=False).encode


class PostgresPublisher:
    """Publishes to every consumer that subscribes to the topic.

    Args:
        url: of the database with the schema `inbox`.
        drop_unsubscribed: ack a message to which nobody subscribes instead of
            nacking it.
    """

    def __init__(self, url: str, *, drop_unsubscribed: bool = False) -> None:
        conninfo(url)
        self._url = url
        self._name = without_password(url)
        self._drop_unsubscribed = drop_unsubscribed
        self._link = Link(url, application_name="pillarbox publisher")
        self._turn = asyncio.Lock()
        self._entered = False

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Make one from a URL of PostgreSQL, with `?unsubscribed=drop` if wanted.

        Raises:
            ConfigError: it isn't such a URL.
        """
        rest, options = take_options(url, (_OPTION,))
        choice = options.get(_OPTION, "keep")
        if choice not in _CHOICES:
            raise ConfigError(
                f"broker URL option {_OPTION}={shorten(choice)}: "
                f"write one of {', '.join(_CHOICES)}"
            )
        return cls(rest, drop_unsubscribed=choice == "drop")

    async def __aenter__(self) -> Self:
        """Connect, and see that the tables are there.

        Raises:
            BrokerUnavailableError: the database can't be reached, or is read-only.
            ConfigError: it has no table `inbox.delivery`, we may not insert, or a
                pooler in transaction mode is in between.
        """
        try:
            await refuse_pooler_async(self._url)
            await self._insert([])
        except DatabaseUnavailableError as error:
            raise BrokerUnavailableError(message_of(error)) from error
        except BrokerUnavailableError:
            await self._link.close()
            raise
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
            await self._link.close()
            raise ConfigError(
                f"broker {self._name} has no table inbox.delivery: run outbox migrate "
                "--database URL for it"
            ) from None
        except psycopg.errors.InsufficientPrivilege as error:
            await self._link.close()
            raise ConfigError(
                f"broker {self._name}: {message_of(error)}; grant the role "
                "pillarbox_relay to its user"
            ) from None
        self._entered = True
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Disconnect."""
        self._entered = False
        await self._link.close()

    async def publish(self, batch: Sequence[Message]) -> Sequence[Confirmation]:
        """Insert the deliveries of a batch, in its order.

        A message to which nobody subscribes is nacked, so that it stays visible in
        the outbox; a later attempt succeeds once somebody does.

        Raises:
            BrokerUnavailableError: the connection broke, the table has no partition
                for today, or nothing may be written; the next call connects again.
                Also when it is not entered.
        """
        if not self._entered:
            raise BrokerUnavailableError(
                "broker postgres: its publisher is not entered"
            )
        try:
            unsubscribed = await self._insert(batch)
        except (psycopg.DataError, psycopg.errors.ProgramLimitExceeded) as error:
            if len(batch) > 1:
                # One value that can't be stored must not be charged to the others.
                return [(await self.publish([message]))[0] for message in batch]
            return [
                Nacked(f"PostgreSQL refused it: {message_of(error)}", permanent=True)
            ]
        except psycopg.ProgrammingError as error:
            # A table or a right that is gone hits every message.
            raise BrokerUnavailableError(
                f"{self._name}: {message_of(error)}"
            ) from error
        return [self._confirmation(message, unsubscribed) for message in batch]

    def _confirmation(self, message: Message, unsubscribed: set[str]) -> Confirmation:
        if message.topic not in unsubscribed or self._drop_unsubscribed:
            return Acked()
        return Nacked(
            f"nobody subscribes to topic {shorten(message.topic)}; "
            f"run inbox subscribe CONSUMER {message.topic}"
        )

    async def _insert(self, batch: Sequence[Message]) -> set[str]:
        async with self._turn:
            try:
                connection = await self._link.connection()
                cursor = await connection.execute(
                    load("relay", "insert_deliveries"), _arrays(batch)
                )
                return {topic for (topic,) in await cursor.fetchall()}
            except DatabaseUnavailableError as error:
                raise BrokerUnavailableError(message_of(error)) from error
            except psycopg.errors.ProgramLimitExceeded:
                raise  # an operational error by its class, of one value in an index
            except (psycopg.OperationalError, psycopg.InterfaceError) as error:
                raise BrokerUnavailableError(
                    f"the connection to {self._name} broke: {message_of(error)}"
                ) from error
            except psycopg.InternalError as error:
                # Such as a standby, which may not write.
                raise BrokerUnavailableError(
                    f"{self._name}: {message_of(error)}"
                ) from error
            except psycopg.errors.CheckViolation as error:
                # Of today's partition; the values themselves hold every CHECK.
                raise BrokerUnavailableError(
                    f"{self._name}: {message_of(error)}; run outbox maintain for it"
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
        "headers": [_encode(dict(m.headers)) if m.headers else "{}" for m in batch],
        "payloads": [m.payload for m in batch],
    }
