"""`pillarbox blocked` lists each blocked key with its head, age and reason."""

import asyncio
import json

import pytest

from pillarbox import Message
from pillarbox.outbox.administration.connection import administration
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.observability.measures.failures import read_blocked
from pillarbox.relay.events import BatchSettled, MessageRefused
from pillarbox.relay.publisher import Acked, Confirmation, Nacked
from tests.acceptance.relays import as_role
from tests.fixtures.positions import defer
from tests.fixtures.presence import record_process
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.readers import add_consumer
from tests.fixtures.relay import PATIENT, insert, running
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for

pytestmark = pytest.mark.timeout(180)


async def test_a_blocked_key_is_listed_with_its_head(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse_poison(message: Message) -> Confirmation:
        return Nacked("no such\nqueue") if message.key == "poison" else Acked()

    head = Message("orders", b"", key="poison")
    insert(database_url, head, Message("orders", b"", key="poison"))
    insert(database_url, Message("orders", b"", key="sound"), Message("orders", b""))
    publisher = ScriptedPublisher(refuse_poison)
    waits = "SELECT 1 FROM outbox.message_status WHERE attempts = 1"
    async with running(database_url, publisher, retry=PATIENT):
        await asyncio.to_thread(
            wait_for, "the head waits", lambda: execute(database_url, waits), seconds=60
        )

    url = as_role(database_url, "pillarbox_monitor")
    assert main(["blocked", "--database", url]) == 0
    summary, _, row = capsys.readouterr().out.splitlines()
    assert summary.endswith(": 1 blocked key, 0 refused messages without a key")
    assert row.split()[0] == "poison"
    assert row.endswith("no such queue")
    assert main(["blocked", "--json", "--database", url]) == 0
    (said,) = json.loads(capsys.readouterr().out)
    assert (said["keys"], said["without_key"]) == (1, 0)
    (blocked,) = said["messages"]
    assert blocked["id"] == str(head.id)
    assert blocked["attempts"] == 1
    assert blocked["last_error"] == "no such\nqueue"


def test_no_key_is_listed_when_none_is_blocked(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    insert(database_url, Message("orders", b"", key="k"))
    assert main(["blocked", "--database", database_url]) == 0
    said = capsys.readouterr().out
    assert said.endswith(": no blocked keys and no refused messages\n")
    assert main(["blocked", "--limit", "0", "--database", database_url]) == 2


async def test_a_refused_message_without_a_key_is_reported_listed_and_counted(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = Message("orders", b"")
    insert(database_url, message)
    publisher = ScriptedPublisher(lambda message: Nacked("no such queue"))
    async with running(database_url, publisher, retry=PATIENT) as relay:
        (delayed,) = await relay.events.wait_for(MessageRefused)
        assert (delayed.id, delayed.key, delayed.attempts) == (message.id, None, 1)
        await relay.events.wait_for(BatchSettled)

    assert main(["blocked", "--database", database_url]) == 0
    summary, _, row = capsys.readouterr().out.splitlines()
    assert summary.endswith(": 0 blocked keys, 1 refused message without a key")
    assert row.startswith("(none)")
    assert str(message.id) in row
    assert row.endswith("no such queue")
    assert main(["blocked", "--json", "--database", database_url]) == 0
    (said,) = json.loads(capsys.readouterr().out)
    assert said["without_key"] == 1
    assert said["messages"][0]["key"] is None


OLD = """
    INSERT INTO outbox.message (id, created_at, lane, topic, key, content_type, payload)
    SELECT outbox.uuid7(), now() - interval '20 minutes', 16, 'orders', key, 'a/b', ''
      FROM unnest(ARRAY['a', 'b', NULL]) AS key
"""


def test_messages_refused_for_a_long_time_are_listed_with_a_consumer_s(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    execute(database_url, OLD)
    defer(database_url, "refused", attempts=3, reason="no such queue")
    main(["doctor", "--json", "--database", database_url])
    report = json.loads(capsys.readouterr().out)
    (finding,) = [f for f in report["findings"] if f["check"] == "failures"]
    assert "2 blocked keys, 1 refused message without a key" in finding["finding"]
    assert finding["remedy"].startswith("pillarbox blocked")

    add_consumer(database_url, "billing", "orders")
    execute(
        database_url,
        "INSERT INTO outbox.deferral (created_at, due_at, seq, id, lane, cause, key,"
        " attempts, reader) SELECT created_at, now() + interval '1 hour', seq, id,"
        " lane, 'refused', key, 2, 'billing' FROM outbox.message WHERE key = 'a'",
    )
    # One of these reads another outbox: only it knows what it blocks.
    record_process(database_url, "consumer", "billing", blocked_keys=1)
    add_consumer(database_url, "mails--bulk", "mails")  # of its queue
    record_process(database_url, "consumer", "mails", blocked_keys=2)
    record_process(database_url, "consumer", "reports", blocked_keys=4)
    url = as_role(database_url, "pillarbox_monitor")
    assert main(["blocked", "--json", "--database", url]) == 0
    (said,) = json.loads(capsys.readouterr().out)
    assert (said["keys"], said["without_key"], said["is_complete"]) == (3 + 4, 1, True)
    assert [it["reader"] for it in said["messages"]].count("billing") == 1
    consumer = as_role(database_url, "pillarbox_consumer")
    assert main(["blocked", "--side=inbox", "--database", consumer]) == 0
    assert ": 7 blocked keys, 0 refused" in capsys.readouterr().out


def test_beyond_a_number_refused_messages_are_not_counted(database_url: str) -> None:
    insert(database_url, *(Message("orders", b"", key=f"{n}") for n in range(30)))
    defer(database_url, "refused", attempts=1)

    with administration(database_url, application_name="test") as connection:
        found = read_blocked(connection, 5, most=20)

    assert (found.keys, found.is_complete, len(found.oldest)) == (21, False, 5)
    assert found.summary.startswith("at least 21 blocked keys, ")
