"""The doctor on a standby, and after a failover to it."""

import pytest

from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.doctor import Doctor
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for
from tests.outbox.administration.test_doctor_of_jobs import LAUNCHER
from tests.servers.standby import private_standby

pytestmark = pytest.mark.timeout(300)

CLUSTER = "SELECT outbox.cluster()"


def test_the_doctor_says_what_a_standby_cannot_show_and_finds_the_rest(
    scheduled_server: PostgresServer, doctor: Doctor
) -> None:
    url = scheduled_server.url
    wait_for("launcher", lambda: execute(url, LAUNCHER))
    execute(url, "CALL outbox.maintain()")
    assert doctor(url) == (0, [])

    with private_standby(url) as standby:
        status, (found,) = doctor(standby.url)

        assert status == 4
        assert (found["check"], found["severity"]) == ("standby", "unknown")
        assert "run pillarbox doctor on the primary" in found["remedy"]

        # The doctor checks the records of the primary, but advises no deletion here.
        execute(
            url,
            "SELECT cron.unschedule(jobid) FROM cron.job"
            " WHERE jobname LIKE 'pillarbox plan detaches of %'",
        )
        execute(
            url,
            "UPDATE outbox.upkeep SET succeeded_at = now() - interval '5 hours',"
            " awaited_at = now() - interval '5 hours'",
        )
        ((lsn,),) = execute(url, "SELECT pg_current_wal_lsn()")
        replayed = "SELECT 1 WHERE pg_last_wal_replay_lsn() >= %s"
        wait_for("replay", lambda: execute(standby.url, replayed, [lsn]))
        status, findings = doctor(standby.url)
        assert status == 3
        # No check writes, which would make it fail.
        assert {f["check"] for f in findings} == {"standby", "upkeep", "cron"}
        assert not any("DELETE FROM cron.job" in f["remedy"] for f in findings)


def test_a_promoted_standby_continues_the_primarys_upkeep_and_positions(
    migrated_server: PostgresServer, doctor: Doctor
) -> None:
    url = migrated_server.url
    execute(url, "CALL outbox.maintain()")

    with private_standby(url) as standby:
        standby.promote()

        execute(standby.url, "CALL outbox.maintain()")
        assert doctor(standby.url) == (0, [])
        # Its rows and sequences are those of the primary: its positions stay valid.
        assert execute(standby.url, CLUSTER) == execute(url, CLUSTER)
