"""Jobs that no worker has started yet are listed, too."""

import json

import pytest

from outbox import Message
from outbox.cli.main import main
from tests.acceptance.relays import as_role
from tests.fixtures.sessions import execute

ENDED = """
    INSERT INTO inbox.job (message_id, message_at, consumer, topic, state, finished_at)
    SELECT %s::uuid, inbox.moment_of(%s::uuid), 'reports', 'reports.requested',
           'success', clock_timestamp()
"""
DELIVER = """
    INSERT INTO inbox.delivery (message_id, lane, schema_version, consumer, topic,
                                content_type, headers, payload)
    VALUES (%s, 3, 1, %s, %s, 'text/plain', '{}', '')
"""
ACK = """
    INSERT INTO inbox.ack (created_at, first_seq, last_seq, lane, consumer, seqs,
                           moments)
    SELECT date_bin('15 minutes', created_at, '2000-01-01Z'), seq, seq, lane, consumer,
           ARRAY[seq], ARRAY[created_at]
      FROM inbox.delivery WHERE message_id = %s
"""


def listed(
    url: str, capsys: pytest.CaptureFixture[str], *options: str
) -> list[tuple[str, str]]:
    monitor = as_role(url, "pillarbox_monitor")
    assert main(["jobs", "--json", "--database", monitor, *options]) == 0
    jobs = json.loads(capsys.readouterr().out)
    return sorted((job["state"], job["message_id"]) for job in jobs)


def test_a_delivery_to_a_long_handler_is_a_queued_job(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, queued, done, other = (Message("reports.requested", b"") for _ in range(4))
    execute(database_url, ENDED, (ended.id, ended.id))
    for message in (ended, queued, done):
        execute(database_url, DELIVER, (message.id, "reports", "reports.requested"))
    execute(database_url, ACK, (done.id,))
    # Nothing indicates that these have long handlers.
    execute(database_url, DELIVER, (other.id, "reports", "reports.printed"))
    execute(database_url, DELIVER, (other.id, "billing", "reports.requested"))

    assert listed(database_url, capsys) == [("queued", str(queued.id))]
    assert listed(database_url, capsys, "--state", "success") == [
        ("success", str(ended.id))
    ]
    assert listed(database_url, capsys, "--consumer", "billing") == []
