"""After an error of the database, what failed is repeated after short waits."""

import psycopg
import pytest

from pillarbox.outbox.events import Event
from pillarbox.outbox.log.database_retry import DatabaseRetry
from pillarbox.outbox.postgres.connection import Link
from pillarbox.relay.events import DatabaseLost, DatabaseRecovered


async def test_waits_stay_below_a_second_until_the_end_of_the_outage_is_reported_once(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def note(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("pillarbox.outbox.log.database_retry.asyncio.sleep", note)
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

    assert all(0.1 <= wait <= 1 for wait in waits)
    assert waits[0] <= 0.3
    assert waits[-1] <= 0.3
    assert [type(event) for event in events] == [
        *[DatabaseLost] * 8,
        DatabaseRecovered,
        DatabaseLost,
    ]
