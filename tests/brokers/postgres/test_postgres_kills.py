"""Replicas killed between any two statements lose nothing and keep keys in order."""

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from typing_extensions import override

from inbox.sources.postgres.inbox_source import SESSION_SETTINGS
from inbox.sources.postgres.lanes import ClaimedDelivery, DeliveryLanes
from inbox.sources.postgres.queue import Outcome, Queue
from outbox.log.settlements import Settlements
from outbox.postgres.connection import Link
from pillarbox import Message
from relay.publishers.postgres import PostgresPublisher
from tests.fixtures.deliveries import count_holding
from tests.fixtures.sessions import execute
from tests.fixtures.urls import copy_of

ALL = range(16)
MESSAGES = 80
KEYS = 5


class Killed(BaseException):
    """The process died."""


class Dying:
    """A process that dies before or after one of its statements."""

    statements_left = 0
    dies_after = False

    @contextmanager
    def statement(self) -> Iterator[None]:
        self.statements_left -= 1
        if self.statements_left <= 0 and not self.dies_after:
            raise Killed
        yield
        if self.statements_left <= 0:
            raise Killed


class DyingSettlements(Settlements):
    def __init__(self, process: Dying) -> None:
        super().__init__("billing", "inbox")
        self._process = process

    @override
    async def store(self, *args: Any, **options: Any) -> None:
        with self._process.statement():
            await super().store(*args, **options)


class DyingQueue(Queue):
    def __init__(self, process: Dying, *args: Any, **options: Any) -> None:
        super().__init__(*args, consumer="billing", **options)
        self._process = process
        self._reader.settlements = DyingSettlements(process)

    @override
    async def _query(self, *args: Any, **parameters: Any) -> Sequence[Any]:
        with self._process.statement():
            return await super()._query(*args, **parameters)


class Shop:
    """Handles deliveries one by one, and checks the order of each key."""

    def __init__(self, url: str, dice: random.Random) -> None:
        self.url = url
        self.dice = dice
        self.published = 0
        self.acked: dict[str | None, set[int]] = defaultdict(set)

    async def live(self) -> None:
        """Work as one replica, until it is killed."""
        lanes = DeliveryLanes(lambda lane: None, lambda lane: None)
        lanes.take(ALL)
        process = Dying()
        queue = DyingQueue(
            process,
            Link(self.url, application_name="test", settings=SESSION_SETTINGS),
            lanes,
            prefetch=self.dice.choice([3, 20, 100]),
            sweep_interval=timedelta(hours=1),
            open_after=timedelta(0),
        )
        process.statements_left = self.dice.randint(5, 20)
        process.dies_after = self.dice.random() < 0.5
        try:
            while True:
                await self.turn(queue, lanes)
        except Killed:
            pass
        finally:
            await queue.close()

    async def turn(self, queue: Queue, lanes: DeliveryLanes) -> None:
        if self.published < MESSAGES and self.dice.random() < 0.5:
            await self.publish(self.dice.randint(1, 15))
        if self.dice.random() < 0.2:
            queue.sweep_soon()
        if self.dice.random() < 0.1:
            await queue.leave(ALL)
        await queue.claim(ALL)
        rows = queue.hand_out(self.dice.randint(1, 30), ALL, ())
        outcomes: list[Outcome] = []
        refused: set[str | None] = set()
        for row in rows:
            key = row.message.key
            if key is not None and key in refused:
                lanes.give_back(row)
                continue
            self.check(row)
            outcome = self.dice.random()
            if outcome < 0.15:
                lanes.block(row)
                refused.add(key)
                outcomes.append(Outcome(row, timedelta(0)))
            elif outcome < 0.25:
                lanes.give_back(row)
                refused.add(key)
            else:
                self.acked[key].add(int(row.message.payload))
                outcomes.append(Outcome(row, None))
        if outcomes:
            await queue.write(outcomes)

    def check(self, row: ClaimedDelivery) -> None:
        """Check that all earlier messages of its key have been handled."""
        key, number = row.message.key, int(row.message.payload)
        if key is not None:
            before = range(int(key), number, KEYS)
            assert self.acked[key].issuperset(before), (key, number)

    async def publish(self, count: int) -> None:
        first, self.published = self.published, self.published + count
        async with PostgresPublisher(copy_of(self.url)) as publisher:
            await publisher.publish(
                [
                    Message(
                        "orders",
                        str(n).encode(),
                        # The last message of each round has no key.
                        key=str(n % KEYS) if n % KEYS < KEYS - 1 else None,
                        tenant=random.Random(n % KEYS).choice([None, "a", "b"]),
                    )
                    for n in range(first, first + count)
                ]
            )

    @property
    def handled(self) -> int:
        return sum(map(len, self.acked.values()))


@pytest.mark.parametrize("seed", range(4))
async def test_after_kills_at_any_statement_each_message_is_handled_in_order(
    database_url: str, seed: int
) -> None:
    execute(database_url, "INSERT INTO inbox.subscription VALUES ('billing', 'orders')")
    shop = Shop(database_url, random.Random(seed))
    lives = 0
    while shop.published < MESSAGES or count_holding(database_url):
        await shop.live()
        lives += 1
        assert lives < 200, f"{shop.handled} of {shop.published} in {lives} lives"
    assert shop.handled == shop.published
    assert lives > 3
