"""Replicas killed between any two statements lose nothing and keep keys in order."""

import random
from collections import defaultdict
from datetime import timedelta
from typing import Any, ClassVar

import pytest
from typing_extensions import override

from pillarbox import Message
from pillarbox.inbox.sources.postgres.held_message import HeldMessage
from pillarbox.outbox.postgres.connection import Connection, Link
from tests.fixtures.positions import count_holding
from tests.fixtures.relay import insert
from tests.fixtures.replicas import Replica, replica, subscribe
from tests.fixtures.variants import as_variant

MESSAGES = 80
KEYS = 5


class Killed(BaseException):
    """The process died."""


class DyingLink(Link):
    """The connection of a process that dies before or after one of its statements."""

    statements_left: ClassVar[int]
    dies_after: ClassVar[bool]

    @override
    async def connection(self) -> Connection:
        connection = await super().connection()
        wait = type(connection).wait

        async def die(gen: Any, *args: Any, **options: Any) -> Any:
            DyingLink.statements_left -= 1
            if self.statements_left <= 0 and not self.dies_after:
                raise Killed
            answer = await wait(connection, gen, *args, **options)
            if self.statements_left <= 0:
                raise Killed
            return answer

        connection.wait = die  # type: ignore[method-assign]
        return connection


class Shop:
    """Handles messages one by one, and checks the order of each key."""

    def __init__(self, url: str, dice: random.Random) -> None:
        self.url = url
        self.dice = dice
        self.added = 0
        self.acked: dict[str | None, set[int]] = defaultdict(set)

    async def live(self) -> None:
        """Work as one replica, until it is killed."""
        DyingLink.statements_left = self.dice.randint(5, 40)
        DyingLink.dies_after = self.dice.random() < 0.5
        prefetch = self.dice.choice([3, 20, 100])
        try:
            async with replica(
                self.url, open_after=timedelta(0), prefetch=prefetch, kind=DyingLink
            ) as living:
                while True:
                    await self.turn(living)
        except Killed:
            pass

    async def turn(self, replica: Replica) -> None:
        if self.added < MESSAGES and self.dice.random() < 0.5:
            await self.add(self.dice.randint(1, 15))
        if self.dice.random() < 0.2:
            replica.sweep_soon()
        if self.dice.random() < 0.1:
            await replica.leave()
        await replica.read()
        refused: set[str | None] = set()
        for row in replica.hand_out(self.dice.randint(1, 30)):
            key = row.message.key
            if key is not None and key in refused:
                replica.give_back(row)
                continue
            self.check(row)
            outcome = self.dice.random()
            if outcome < 0.15:
                replica.end(row, timedelta(0))
                refused.add(key)
            elif outcome < 0.25:
                replica.give_back(row)
                refused.add(key)
            else:
                self.acked[key].add(int(row.message.payload))
                replica.end(row)
        await replica.settle()

    def check(self, row: HeldMessage) -> None:
        """Check that all earlier messages of its key have been handled."""
        key, number = row.message.key, int(row.message.payload)
        if key is not None:
            before = range(int(key), number, KEYS)
            assert self.acked[key].issuperset(before), (key, number)

    async def add(self, count: int) -> None:
        first, self.added = self.added, self.added + count
        insert(
            self.url,
            *(
                Message(
                    "orders",
                    str(n).encode(),
                    # The last message of each round has no key.
                    key=str(n % KEYS) if n % KEYS < KEYS - 1 else None,
                    tenant=random.Random(n % KEYS).choice([None, "a", "b"]),
                )
                for n in range(first, first + count)
            ),
        )

    @property
    def handled(self) -> int:
        return sum(map(len, self.acked.values()))


@pytest.mark.parametrize("seed", [0, *map(as_variant, range(1, 4))])
async def test_after_kills_at_any_statement_each_message_is_handled_in_order(
    database_url: str, seed: int
) -> None:
    subscribe(database_url, "billing", "orders")
    shop = Shop(database_url, random.Random(seed))
    lives = 0
    while shop.added < MESSAGES or count_holding(database_url):
        await shop.live()
        lives += 1
        assert lives < 200, f"{shop.handled} of {shop.added} in {lives} lives"
    assert shop.handled == shop.added
    assert lives > 3
