"""How late a message can arrive, compared with how long its receipts are kept."""

from datetime import timedelta

import pytest

from outbox.postgres.late_messages import find_short_retention, minimum_retention
from outbox.retry import RetryPolicy

DAY = 86_400.0
USUAL = minimum_retention()
PATIENT = RetryPolicy(max_attempts=100, max_delay=timedelta(hours=2))


def test_longer_retries_need_a_longer_retention() -> None:
    assert minimum_retention(RetryPolicy()) == USUAL
    more = timedelta(hours=200) - 8 * timedelta(minutes=5)
    assert minimum_retention(PATIENT) == USUAL + more


@pytest.mark.parametrize(("kept", "longer"), [(14, " 15d"), (15, ""), (60, "")])
def test_retries_that_outlast_the_minimum_are_reported_with_the_command_to_run(
    kept: int, longer: str
) -> None:
    minimums = [
        ("inbox.job", 20 * DAY, 30 * DAY),
        ("inbox.receipt", USUAL.total_seconds(), kept * DAY),
    ]

    (found,) = find_short_retention(PATIENT, minimums)

    assert (found.table, found.minimum) == ("inbox.receipt", USUAL)
    assert found.needed == minimum_retention(PATIENT)
    assert (
        found.remedy == f"pillarbox retention set inbox.receipt{longer} --minimum 15d"
    )


@pytest.mark.parametrize("attempts", [1, 8])
def test_default_retries_do_not_override_a_lower_minimum(
    attempts: int,
) -> None:
    low = [("inbox.receipt", DAY, DAY)]

    assert not list(find_short_retention(RetryPolicy(max_attempts=attempts), low))
