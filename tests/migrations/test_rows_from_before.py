"""Limits that are added to a table with rows above them."""

import psycopg
import pytest

from outbox.administration import migrate as migrations
from relay.events import MessageDeadLettered
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import dead_letters, running, unsettled
from tests.fixtures.sessions import execute
from tests.migrations.test_step_back import step

pytestmark = pytest.mark.usefixtures("alone")

INSERT = """
    INSERT INTO outbox.message
           (id, lane, topic, content_type, headers, payload, available_at)
    SELECT outbox.uuid7(), 16, 't', 'c', jsonb_build_object('h', repeat('x', 300000)),
           '', CASE WHEN {waits} THEN now() - interval '1 second' END
"""
NOT_VALID = (
    "SELECT conname FROM pg_constraint WHERE NOT convalidated"
    " AND connamespace = 'outbox'::regnamespace"
)


async def test_existing_rows_over_a_new_limit_are_settled_and_new_ones_refused(
    database_url: str,
) -> None:
    url = database_url
    step(url, "0005")
    for waits in ("false", "true"):
        execute(url, INSERT.format(waits=waits))

    migrations.migrate(url, with_cron=False)

    assert execute(url, NOT_VALID) == []
    with pytest.raises(psycopg.errors.CheckViolation, match="headers_size"):
        execute(url, INSERT.format(waits="false"))
    async with running(url, ScriptedPublisher()) as relay:
        await relay.events.wait_for(MessageDeadLettered, 2)
    assert unsettled(url) == 0
    reasons = [reason for _, _, reason in dead_letters(url)]
    assert reasons == ["headers is over 262144 bytes"] * 2
