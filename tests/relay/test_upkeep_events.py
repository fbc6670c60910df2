"""A relay reports a failure of the upkeep, which pg_cron can run unobserved."""

from datetime import timedelta

import pytest

from outbox import Message
from outbox.events import UpkeepFailed
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import defer, insert, running
from tests.fixtures.sessions import execute


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ("SELECT outbox.note_failure('no lock')", "no lock"),
        (
            "UPDATE outbox.upkeep SET succeeded_at = now() - interval '20 days'",
            "the clock jumped ahead",
        ),
    ],
)
async def test_a_failure_of_the_upkeep_is_an_event(
    record: str, reason: str, database_url: str
) -> None:
    execute(database_url, "CALL outbox.maintain()")
    execute(database_url, record)

    async with running(database_url, ScriptedPublisher()) as relay:
        (failed,) = await relay.events.wait_for(UpkeepFailed)

    assert reason in failed.reason


async def test_a_relay_is_silent_about_a_healthy_upkeep(database_url: str) -> None:
    execute(database_url, "CALL outbox.maintain()")
    insert(database_url, Message("due", b""))
    defer(database_url, "due", due_in=timedelta(seconds=-1))
    publisher = ScriptedPublisher()

    async with running(database_url, publisher) as relay:
        # What finds it looks at the upkeep first.
        await publisher.until_acked(1)

    assert relay.events.of(UpkeepFailed) == []
