"""Jobs that no worker has started yet are listed, too."""

import json

import pytest

from outbox.cli.main import main
from pillarbox import Message
from tests.acceptance.relays import as_role
from tests.fixtures.deliveries import subscribe_from_oldest
from tests.fixtures.sessions import execute

ENDED = """
    INSERT INTO inbox.job (message_id, message_at, consumer, topic, state, finished_at)
    SELECT %s::uuid, inbox.moment_of(%s::uuid), 'reports', 'reports.requested',
           'success', clock_timestamp()
"""
DELIVER = """
    INSERT INTO inbox.message (message_id, lane, schema_version, topic, content_type,
                               headers, payload)
    VALUES (%s, 3, 1, %s, 'text/plain', '{}', '')
"""
ACK = """
    INSERT INTO inbox.deferral (created_at, seq, lane, cause, consumer)
    SELECT created_at, seq, lane, 'acked', 'reports'
      FROM inbox.message WHERE message_id = %s
"""


def deliver(url: str, message: Message, topic: str) -> None:
    subscribe_from_oldest(url, "reports", topic)
    execute(url, DELIVER, (message.id, topic))


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
        deliver(database_url, message, "reports.requested")
    execute(database_url, ACK, (done.id,))
    # Nothing indicates that these have long handlers.
    deliver(database_url, other, "reports.printed")
    subscribe_from_oldest(database_url, "billing", "reports.requested")

    assert listed(database_url, capsys) == [("queued", str(queued.id))]
    assert listed(database_url, capsys, "--state", "success") == [
        ("success", str(ended.id))
    ]
    assert listed(database_url, capsys, "--consumer", "billing") == []
    assert len(listed(database_url, capsys, "--state", "any")) == 2
    assert len(listed(database_url, capsys, "--state", "any", "--limit", "1")) == 1
