"""A source that can't record what became of its deliveries delivers nothing."""

import pytest

from inbox.sources.postgres import PostgresSource
from inbox.sources.postgres.source import OUTCOMES
from outbox.errors import BrokerUnavailableError
from outbox.testing.postgres import PostgresServer
from relay.publishers.postgres import PostgresPublisher
from tests.fixtures.consumers import numbered
from tests.fixtures.passwords import set_password
from tests.fixtures.sessions import execute

END_SOURCE = """
    SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity
     WHERE usename = 'mary' AND datname = current_database()
"""
READ_ONLY = "ALTER ROLE mary SET default_transaction_read_only = on"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (READ_ONLY, "default_transaction_read_only"),
        *(
            (f"REVOKE INSERT ON {table} FROM pillarbox_consumer", "pillarbox doctor")
            for table in OUTCOMES
        ),
    ],
)
async def test_a_source_delivers_nothing_whose_outcome_it_cannot_record(
    change: str, words: str, migrated_server: PostgresServer
) -> None:
    url = migrated_server.url
    mary = set_password(url, "mary", "secret")
    execute(url, "INSERT INTO inbox.subscription VALUES ('billing', 'orders')")
    reasons: list[str] = []
    async with (
        PostgresPublisher.from_url(url) as publisher,
        PostgresSource(mary, consumer="billing", topics=["orders"]) as source,
    ):
        await publisher.publish(numbered(1))
        while not (first := await source.receive(limit=10)):
            pass
        assert len(first) == 1
        await first[0].ack()
        execute(url, change)
        execute(url, END_SOURCE)
        await publisher.publish(numbered(5))
        while len(reasons) < 5:
            try:
                assert await source.receive(limit=10) == []
            except BrokerUnavailableError as error:
                reasons.append(str(error))
    assert any(words in reason for reason in reasons), reasons
