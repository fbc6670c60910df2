"""Partitions and jobs on the page."""

import re
from datetime import UTC, datetime, timedelta

import pytest

from tests.fixtures.consumers import id_of
from tests.fixtures.sessions import execute
from tests.fixtures.web import BOB, as_role, browsing
from tests.outbox.administration.test_upkeep import old_partition
from tests.outbox.web.test_dead_letters import HOSTILE, shown

PENDING = """
INSERT INTO inbox.dead_letter (created_at, origin, message_id, topic, attempts,
                schema_version, content_type, headers, payload, error_reason)
VALUES (%s, 'o', 'm', 't', 1, 1, 'c', '{}', '', 'why')
"""
JOB = """
INSERT INTO inbox.job (message_id, message_at, consumer, topic, state, worker,
                       lease_until, started_at)
SELECT id, inbox.moment_of(id), %s, %s, 'in_progress', 'host:1', now() + %s, now()
  FROM outbox.uuid7() AS id
RETURNING message_id
"""


@pytest.mark.week
def test_the_partitions_of_a_table_are_shown_with_sizes_and_retention(
    database_url: str,
) -> None:
    with browsing(database_url) as browser:
        text = browser.get("/partitions")
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    assert f"{today} today" in shown(text)
    assert "inbox.receipt" in text
    assert "partitions of 1d; rows are kept 30d; 7 are made ahead." in shown(text)
    # One fewer if a new day has begun since the partitions were made.
    assert len(re.findall(r"1 today, [67] ahead\.", shown(text))) >= 5


def test_held_partitions_and_a_failed_upkeep_are_shown_with_their_remedies(
    database_url: str,
) -> None:
    old_partition(database_url, 40, "inbox.dead_letter")
    ((oldest,),) = execute(
        database_url,
        "SELECT min(starts_at) FROM outbox.partitions('inbox.dead_letter')",
    )
    execute(database_url, PENDING, [oldest])
    execute(database_url, "SELECT outbox.note_failure('<b>no space</b>')")
    with browsing(database_url) as browser:
        text = browser.get("/partitions")
    assert "<b>no space" not in text
    text = shown(text)
    assert "the upkeep failed at" in text
    assert "pillarbox maintain" in text
    assert "is held: 1 unsettled row holds it past its retention" in text
    assert "SELECT * FROM inbox.dead_letter" in text


def test_jobs_are_listed_with_their_workers(database_url: str) -> None:
    execute(database_url, JOB, ["reports", "a", timedelta(hours=1)])
    execute(database_url, JOB, ["exports", HOSTILE, -timedelta(hours=1)])
    with browsing(database_url) as browser:
        text = browser.get("/jobs")
        assert "<img" not in text
        assert shown(text).count("in_progress") >= 2
        assert "host:1 is gone" in shown(text)
        assert "exports" not in browser.get("/jobs?consumer=reports")
        assert "No job is failure now." in shown(browser.get("/jobs?state=failure"))
        browser.get("/jobs?state=lost")
        assert browser.status == 400


def test_a_job_is_cancelled_and_who_asked_is_recorded(database_url: str) -> None:
    ended = -timedelta(hours=1)
    ((running,),) = execute(database_url, JOB, ["reports", "a", timedelta(hours=1)])
    ((abandoned,),) = execute(database_url, JOB, ["exports", "a", ended])
    with browsing(database_url, token=BOB) as browser:
        assert "/jobs/cancel" not in browser.get("/jobs"), "bob has read-only access"
    with browsing(as_role(database_url, "pillarbox_web")) as browser:
        for job in (f"reports {running}", f"exports {abandoned}"):
            browser.get("/jobs")
            browser.post("/jobs/cancel", job=job)
            assert (job, browser.status) == (job, 200)
        never = f"\0 {id_of(datetime.now(UTC))}"
        for job in ("", "reports", "reports 7", never, "reports " + "0" * 32):
            browser.get("/jobs")
            browser.post("/jobs/cancel", job=job)
            assert (job, browser.status) == (job, 400)
    query = "SELECT consumer, state, reason FROM inbox.job ORDER BY 1"
    assert execute(database_url, query) == [
        ("exports", "cancelled", "cancelled by ann"),
        ("reports", "waiting", "cancelled by ann"),
    ]
