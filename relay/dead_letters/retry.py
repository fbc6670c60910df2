"""Retries the dead letters of the outbox by publishing each once more."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, Self

import psycopg

from pillarbox.outbox.cloudevents.raw_text import storable_reason
from pillarbox.outbox.dead_letters.letter import Letter
from pillarbox.outbox.dead_letters.retry import (
    Candidate,
    Failure,
    Outcome,
    outcome_event,
)
from pillarbox.outbox.dead_letters.schedule import RetrySchedule
from pillarbox.outbox.dead_letters.statement import Statement, statement
from pillarbox.outbox.errors import (
    BrokerUnavailableError,
    ConfigError,
    DatabaseUnavailableError,
    InvalidMessageError,
    message_of,
    one_line,
)
from pillarbox.outbox.events import Event
from pillarbox.outbox.log.claim import problem_of_headers
from pillarbox.outbox.payload.payload_codec import decoded, is_encoded
from pillarbox.outbox.postgres.connection import Connection, connect
from pillarbox.outbox.postgres.pooler_check import refuse_pooler_async
from pillarbox.outbox.postgres.remedy import remedy_of
from pillarbox.relay.config import RelayConfig
from pillarbox.relay.publish import MAX_REASON, publish_messages
from pillarbox.relay.publisher import Nacked, Publisher
from pillarbox.relay.reader import ORIGIN, RelayReader

_APPLICATION: Final = "pillarbox relay dead letters"


class PublishingRetrier:
    """Publishes dead letters one by one, each with its row locked.

    An ack makes a dead letter SUCCEEDED; a nack counts as a failed retry, unless the
    broker requested a delay. Unlike in the relay, a transaction stays open while this
    waits for the broker, so that a dead letter isn't retried twice at once. A dead
    letter is published after the messages of its key published in the meantime. For one
    task.

    Args:
        url: the database's URL.
        make_publisher: creates the publisher, which is entered at the first retry.
        broker: where it publishes; see `Relay`. It must be the broker of the reader
            that gave a dead letter up.
        config: the relay's settings; its codec and publish timeout apply.
        schedule: determines when a failed dead letter is retried.
    """

    def __init__(
        self,
        url: str,
        make_publisher: Callable[[], Publisher],
        *,
        broker: str | None = None,
        config: RelayConfig | None = None,
        schedule: RetrySchedule | None = None,
        notify: Callable[[Event], None] = lambda _: None,
    ) -> None:
        self.origin: Final = None
        self._url = url
        self._make_publisher = make_publisher
        self._broker = broker
        self._config = config or RelayConfig()
        self._schedule = schedule or RetrySchedule()
        self._notify = notify
        self._exit = AsyncExitStack()
        self._connection: Connection | None = None
        self._publisher: Publisher | None = None

    async def __aenter__(self) -> Self:
        """Return it: it connects when there is something to publish."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Disconnect."""
        await self._exit.aclose()

    async def fetch(
        self, name: Statement, parameters: Mapping[str, Any]
    ) -> Sequence[Sequence[Any]]:
        """Run a statement in a transaction of its own, and return its rows."""
        async with self._database() as connection:
            return await _run(connection, name, parameters)

    async def retry(self, candidate: Candidate) -> Outcome:
        """Publish one dead letter, and record the broker's answer.

        Raises:
            ConfigError: the relays of its reader publish to another broker.
        """
        publisher = await self._connected()
        async with self._database() as connection, connection.transaction():
            found = candidate.parameters()
            rows = await _run(connection, Statement.LOCK, found)
            if not rows:
                return Outcome.SKIPPED
            letter = Letter.of(rows[0])
            reader = letter.origin.removeprefix(ORIGIN)
            await RelayReader(reader, self._broker, publisher).require(connection)
            nacked = await self._publish(letter, publisher)
            failure = None
            if nacked is None:
                await _run(connection, Statement.MARK_SUCCEEDED, found)
            else:
                failure = Failure(
                    reason=storable_reason(nacked.reason), delay=nacked.retry_after
                )
                values = failure.parameters(letter, self._schedule.delay)
                await _run(connection, Statement.MARK_PENDING, values)
        self._notify(outcome_event("outbox", letter, failure))
        return Outcome.SUCCEEDED if failure is None else Outcome.FAILED

    async def _publish(self, letter: Letter, publisher: Publisher) -> Nacked | None:
        """Return the failure, or None if the broker acked."""
        try:
            message = letter.message()
            if self._config.codec is not None and is_encoded(message):
                message = decoded(message, self._config.codec)
        except InvalidMessageError as error:
            return Nacked(str(error))
        if (problem := problem_of_headers(message.headers)) is not None:
            return Nacked(problem, permanent=True)
        try:
            (answer,) = await publish_messages([message], publisher, self._config)
        except BrokerUnavailableError:
            raise
        except Exception as error:  # noqa: BLE001 - as in the relay
            return Nacked(one_line(error)[:MAX_REASON])
        return answer if isinstance(answer, Nacked) else None

    async def _connected(self) -> Publisher:
        # Connect only when there is something to publish; usually nothing is due.
        if self._publisher is None:
            await refuse_pooler_async(self._url)
            self._publisher = await self._exit.enter_async_context(
                self._make_publisher()
            )
        return self._publisher

    @asynccontextmanager
    async def _database(self) -> AsyncIterator[Connection]:
        try:
            if self._connection is None:
                self._connection = await self._exit.enter_async_context(
                    await connect(
                        self._url,
                        application_name=_APPLICATION,
                        # The transaction waits for the broker, which the publish
                        # timeout limits.
                        settings={"idle_in_transaction_session_timeout": "0"},
                    )
                )
            yield self._connection
        except psycopg.errors.InsufficientPrivilege as error:
            raise ConfigError(
                f"{error.diag.message_primary}: "
                + remedy_of(error, "GRANT pillarbox_relay TO its role")
            ) from error
        except psycopg.Error as error:
            raise DatabaseUnavailableError(
                f"can't read or write dead letters: {message_of(error)}"
            ) from error


async def _run(
    connection: Connection, name: Statement, parameters: Mapping[str, Any]
) -> list[tuple[Any, ...]]:
    cursor = await connection.execute(statement("outbox", name), parameters)
    return await cursor.fetchall()
