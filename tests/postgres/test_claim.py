"""A claim while somebody else settles."""

import psycopg
import pytest

import relay.claim
from outbox import Message
from outbox.database import connect, conninfo
from outbox.lane import PRIORITIES, lanes_of
from relay.claim import claim_batch
from relay.config import RelayConfig
from relay.lanes import Lanes
from tests.fixtures.claimed import HeldLease
from tests.fixtures.relay import insert

NACK = """
    UPDATE outbox.message SET attempts = 1, available_at = now() + interval '1 hour'
     WHERE topic = 'head'
"""


@pytest.mark.parametrize("moment", ["_list_blocked_keys", "_acquaint"])
async def test_a_nack_that_is_settled_late_does_not_let_the_key_go_on_without_its_head(
    moment: str, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    insert(database_url, Message("head", b"", key="k"), Message("next", b"", key="k"))
    original = getattr(relay.claim, moment)

    async def interrupted(*arguments: object) -> object:
        result = await original(*arguments)
        with psycopg.connect(conninfo(database_url)) as late:
            late.execute(NACK)
        return result

    monkeypatch.setattr(relay.claim, moment, interrupted)
    numbers = [number for priority in PRIORITIES for number in lanes_of(priority)]
    board = Lanes(HeldLease(numbers), RelayConfig().weights, 1)
    board.take(numbers)
    async with await connect(database_url, application_name="test") as connection:
        batch = await claim_batch(connection, board, board.pick(), RelayConfig())

    assert [row.topic for row in batch.rows] == ["head", "next"]
