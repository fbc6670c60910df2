"""The sweep: messages that come due, and the connection that it shares with workers."""

import asyncio
from datetime import timedelta
from itertools import pairwise

import pytest

import relay.sweep
from outbox.lane import PRIORITIES, lanes_of
from outbox.postgres.connection import Link, connect
from relay.config import RelayConfig
from relay.lanes.board import LaneBoard
from relay.sweep import sweep_lanes
from tests.fixtures.claimed import HeldLease
from tests.fixtures.relay import execute

FILL = """
INSERT INTO outbox.message (id, lane, topic, content_type, payload, available_at)
SELECT outbox.uuid7(), 16 + n % 8, 'due', 'text/plain', '', now() - interval '1 s'
  FROM generate_series(1, 800) AS n
"""
WAITING = "SELECT count(*) FROM outbox.message WHERE available_at IS NOT NULL"


# The portion ends with a lane's share of 25, in the middle of one, or is smaller.
@pytest.mark.parametrize("portion", [50, 70, 15])
async def test_workers_get_their_turn_while_many_messages_are_made_ready(
    database_url: str, portion: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay.sweep, "_PORTION", portion)
    execute(database_url, FILL)
    lanes = [number for priority in PRIORITIES for number in lanes_of(priority)]
    # All of it is made ready at the first poll: there is no other.
    config = RelayConfig(batch_size=100, poll_interval=timedelta(hours=1))
    board = LaneBoard(HeldLease(lanes), config.weights, config.concurrency)
    board.take(lanes)
    link = Link(database_url, application_name="test")
    seen: list[int] = []

    async with await connect(database_url, application_name="test") as connection:
        sweeping = asyncio.create_task(
            sweep_lanes(board, link, config, lambda event: None)
        )
        try:
            async with asyncio.timeout(60):
                while not seen or seen[-1]:
                    async with link.turn:
                        cursor = await connection.execute(WAITING)
                        ((waiting,),) = await cursor.fetchall()
                    seen.append(waiting)
        finally:
            sweeping.cancel()
            await asyncio.gather(sweeping, return_exceptions=True)

    assert max(before - after for before, after in pairwise(seen)) <= portion
