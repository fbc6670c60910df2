"""Outcomes are gathered, written in order, and never dropped."""

import asyncio
from collections.abc import Sequence

import pytest

from inbox.outcomes import Outcomes
from outbox.errors import BrokerUnavailableError


class Written:
    """Keeps what is written; fails as often as it is told to."""

    def __init__(self, *, failures: int = 0) -> None:
        self.batches: list[list[int]] = []
        self._failures = failures

    async def __call__(self, batch: Sequence[int]) -> None:
        if self._failures:
            self._failures -= 1
            raise BrokerUnavailableError("away")
        self.batches.append(list(batch))


async def test_what_is_added_while_one_batch_is_written_makes_up_the_next() -> None:
    written = Written()
    outcomes = Outcomes(written, max_batch=3)
    for number in range(7):
        outcomes.add(number)
    outcomes.close()
    await outcomes.run()
    assert written.batches == [[0, 1, 2], [3, 4, 5], [6]]


async def test_a_broker_that_is_away_loses_nothing() -> None:
    written = Written(failures=2)
    outcomes = Outcomes(written)
    outcomes.add(1)
    writing = asyncio.create_task(outcomes.run())
    outcomes.add(2)
    outcomes.close()
    await writing
    assert [number for batch in written.batches for number in batch] == [1, 2]


async def test_a_fault_of_the_writer_ends_the_task() -> None:
    async def fail(batch: Sequence[int]) -> None:
        raise RuntimeError("bug")

    outcomes = Outcomes(fail)
    outcomes.add(1)
    with pytest.raises(RuntimeError, match="bug"):
        await outcomes.run()
