"""pg_cron, which runs commands at top level, detaches partitions."""

import psycopg
import pytest

from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.positions import count_holding, replay
from tests.fixtures.sessions import execute
from tests.outbox.administration.retiring import EXPIRED, acting_as, detach, steps
from tests.outbox.administration.test_upkeep import FOLLOWERS, add_old, old_partition

PLAN = "SELECT outbox.schedule_detaches()"
UPKEEP = "CALL outbox.maintain()"


def test_pg_cron_gets_a_job_for_each_partition_which_is_removed_afterwards(
    scheduled_server: PostgresServer,
) -> None:
    url = scheduled_server.url
    old_partition(url, 20)
    old_partition(url, 25)
    jobs = (
        "SELECT jobname, schedule, command FROM cron.job WHERE jobname LIKE"
        " 'pillarbox detach %' AND username = 'pillarbox_detacher' ORDER BY jobid"
    )
    with (
        acting_as(url, "pillarbox_detacher") as detacher,
        acting_as(url, "pillarbox_maintainer") as maintainer,
    ):
        detacher.execute(PLAN)
        scheduled = execute(url, jobs)
        assert len({schedule for _, schedule, _ in scheduled}) == 2
        for name, schedule, command in scheduled:
            task, _, database = name.partition(" of ")
            assert database == "pillarbox"
            assert task.removeprefix("pillarbox detach ") in command
            assert len(schedule.split()) == 5
            detacher.execute(command)
        maintainer.execute(UPKEEP)
        assert execute(url, EXPIRED) == []
        # The next plan covers the followers of the dropped partitions.
        detacher.execute(PLAN)
        following = execute(url, jobs)
        assert {
            name.removeprefix("pillarbox detach ").partition("_p")[0]
            for name, _, _ in following
        } == set(FOLLOWERS)
        for _, _, command in following:
            detacher.execute(command)
        maintainer.execute(UPKEEP)
        detacher.execute(PLAN)

    assert execute(url, jobs) == []
    assert steps(url, "detach", "drop", "finalize", table=None) == []


def test_a_row_that_is_replayed_between_the_plan_and_its_job_is_not_lost(
    scheduled_server: PostgresServer,
) -> None:
    url = scheduled_server.url
    for days in (20, 25):
        old_partition(url, days)
        add_old(url, days, outcome="published")
    with (
        acting_as(url, "pillarbox_detacher") as detacher,
        acting_as(url, "pillarbox_maintainer") as maintainer,
    ):
        detacher.execute(PLAN)
        jobs = execute(
            url, "SELECT command FROM cron.job WHERE jobname LIKE '% detach %'"
        )
        assert len(jobs) == 2
        replay(url)
        maintainer.execute(UPKEEP)
        for (command,) in jobs:
            detacher.execute(command)
        assert execute(url, EXPIRED) == []

        detacher.execute(PLAN)

    assert len(execute(url, EXPIRED)) == 2
    assert count_holding(url) == 2


def test_a_detach_that_failed_as_a_job_is_reported_by_the_next_plan(
    scheduled_server: PostgresServer,
) -> None:
    url = scheduled_server.url
    old_partition(url)
    ((partition,),) = execute(url, EXPIRED)
    failed = (
        "INSERT INTO cron.job_run_details (jobid, runid, status, return_message,"
        " username) SELECT jobid, 1, 'failed', E'ERROR:  no\\nDETAIL:  Key (id)=(7)',"
        " username FROM cron.job WHERE jobname LIKE 'pillarbox detach %'"
    )
    failures = "SELECT object, failure FROM outbox.upkeep_failure"
    with acting_as(url, "pillarbox_detacher") as detacher:
        detacher.execute(PLAN)
        execute(url, failed)
        detacher.execute(PLAN)
        ((object_, failure),) = execute(url, failures)
        assert object_ == partition
        assert failure == f"detach of {partition}: ERROR:  no"

        # It stays until the partition is detached.
        with (
            acting_as(url, "pillarbox_maintainer") as maintainer,
            pytest.raises(psycopg.errors.RaiseException, match="detach of"),
        ):
            maintainer.execute(UPKEEP)
        detach(url, partition)
    execute(url, UPKEEP)
    assert execute(url, failures) == []
