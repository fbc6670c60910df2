"""After an error of the database, what failed is repeated after growing waits."""

import psycopg
import pytest

from outbox.events import Event
from outbox.log.database_retry import DatabaseRetry
from outbox.postgres.connection import Link
from relay.events import DatabaseLost, DatabaseRecovered


async def test_waits_grow_up_to_a_limit_until_the_end_of_the_outage_is_reported_once(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def note(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("outbox.log.database_retry.asyncio.sleep", note)
    events: list[Event] = []
    retry = DatabaseRetry(events.append)
    link = Link(database_url, application_name="test")
    retry.succeeded()
    for _ in range(8):
        error = psycopg.OperationalError("away")
        with pytest.raises(psycopg.OperationalError, match="away"):
            async with link.use() as connection:
                raise error
        await retry.failed(error)
        assert connection.closed
    for _ in range(2):
        retry.succeeded()
    await retry.failed(psycopg.OperationalError("away again"))

    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 0.1]
    assert [type(event) for event in events] == [
        *[DatabaseLost] * 8,
        DatabaseRecovered,
        DatabaseLost,
    ]
