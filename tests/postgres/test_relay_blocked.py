"""`relay blocked`: a key that waits is listed with its head, its age and the reason."""

import asyncio
import json
from datetime import timedelta

import pytest

from outbox import Message
from outbox.retry import RetryPolicy
from relay.cli import main
from relay.publisher import Acked, Confirmation, Nacked
from tests.acceptance.relays import as_role
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import execute, insert, running
from tests.fixtures.waiting import wait_for

pytestmark = pytest.mark.timeout(180)

HOUR = timedelta(hours=1)


async def test_a_blocked_key_is_listed_with_its_head(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse_poison(message: Message) -> Confirmation:
        return Nacked("no such\nqueue") if message.key == "poison" else Acked()

    head = Message("orders", b"", key="poison")
    insert(database_url, head, Message("orders", b"", key="poison"))
    insert(database_url, Message("orders", b"", key="sound"), Message("orders", b""))
    publisher = ScriptedPublisher(refuse_poison)
    retry = RetryPolicy(first_delay=HOUR, max_delay=HOUR)
    waits = "SELECT 1 FROM outbox.message WHERE attempts = 1"
    async with running(database_url, publisher, retry=retry):
        await asyncio.to_thread(
            wait_for, "the head waits", lambda: execute(database_url, waits), seconds=60
        )

    url = as_role(database_url, "pillarbox_monitor")
    assert main(["blocked", "--database", url]) == 0
    _, row = capsys.readouterr().out.splitlines()
    assert row.split()[0] == "poison"
    assert row.endswith("no such queue")
    assert main(["blocked", "--json", "--database", url]) == 0
    (blocked,) = json.loads(capsys.readouterr().out)
    assert blocked["id"] == str(head.id)
    assert blocked["attempts"] == 1
    assert blocked["last_error"] == "no such\nqueue"


def test_no_key_is_blocked_where_nothing_waits(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    insert(database_url, Message("orders", b"", key="k"))
    assert main(["blocked", "--database", database_url]) == 0
    assert capsys.readouterr().out == "no key is blocked\n"
    assert main(["blocked", "--limit", "0", "--database", database_url]) == 2
