"""A relay reports the state of the upkeep, which pg_cron can run unobserved."""

import pytest

from outbox.events import UpkeepFailed, UpkeepMeasured
from outbox.observability.prometheus import PrometheusEvents
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import running
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
async def test_a_failure_of_the_upkeep_is_an_event_and_a_metric(
    record: str, reason: str, database_url: str
) -> None:
    execute(database_url, "CALL outbox.maintain()")
    execute(database_url, record)

    async with running(database_url, ScriptedPublisher()) as relay:
        (failed,) = await relay.events.wait_for(UpkeepFailed)

    assert reason in failed.reason
    metrics = PrometheusEvents()
    (measured,) = relay.events.of(UpkeepMeasured)
    metrics(measured)
    assert metrics.registry.get_sample_value("pillarbox_upkeep_failing") == 1
    assert metrics.registry.get_sample_value("pillarbox_upkeep_age_seconds") is not None


async def test_a_healthy_upkeep_is_measured_and_not_failing(
    database_url: str,
) -> None:
    execute(database_url, "CALL outbox.maintain()")

    async with running(database_url, ScriptedPublisher()) as relay:
        (measured,) = await relay.events.wait_for(UpkeepMeasured)

    assert not measured.is_failing
    assert measured.age is not None
    assert relay.events.of(UpkeepFailed) == []
