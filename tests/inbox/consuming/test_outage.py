"""An outage of the handlers' database: one probe asks for all messages."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from pillarbox.inbox.consuming.dispatch import Dispatcher
from pillarbox.inbox.consuming.fair_scheduler import FairScheduler
from pillarbox.inbox.consuming.outage import DatabaseOutage
from pillarbox.inbox.events import HandlerDatabaseLost, HandlerDatabaseRecovered
from pillarbox.inbox.source import Delivery
from pillarbox.outbox.errors import DatabaseUnavailableError
from pillarbox.outbox.events import Observers
from pillarbox.outbox.retry import RetryPolicy
from pillarbox.outbox.testing.events import RecordedEvents

WAITING = 64
AWAY = DatabaseUnavailableError("away")
LONG = timedelta(hours=1)


class Database:
    """Refuses some probes, and then answers."""

    def __init__(self, refused: int) -> None:
        self.refused = refused
        self.probes = 0
        self.probed = asyncio.Event()
        self.events = RecordedEvents()
        executor: Any = self
        self.outage = DatabaseOutage("billing", Observers([self.events]), executor)

    async def probe(self) -> None:
        self.probes += 1
        self.probed.set()
        if self.probes <= self.refused:
            raise AWAY


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = timedelta(milliseconds=1)
    policy = RetryPolicy(first_delay=quick, max_delay=10 * quick)
    monkeypatch.setattr("pillarbox.inbox.consuming.outage.RECONNECT", policy)
    monkeypatch.setattr(
        "pillarbox.inbox.consuming.outage.check_writable", Database.probe
    )


@pytest.fixture
def dispatcher() -> Dispatcher:
    async def work(_: Delivery) -> bool:
        raise NotImplementedError

    scheduler = FairScheduler(1, {"default": 1})
    return Dispatcher(
        work, scheduler=scheduler, queue="default", max_lines=1, max_waiting=0
    )


def waiting(
    database: Database, dispatcher: Dispatcher, count: int = WAITING
) -> list[asyncio.Task[bool]]:
    return [
        asyncio.create_task(database.outage.wait(AWAY, 1, dispatcher))
        for _ in range(count)
    ]


async def test_many_messages_wait_for_one_probe(dispatcher: Dispatcher) -> None:
    database = Database(refused=3)
    assert await asyncio.gather(*waiting(database, dispatcher)) == [True] * WAITING
    assert database.probes == 4
    assert len(database.events.of(HandlerDatabaseLost)) == 1


async def test_a_heartbeat_that_succeeds_ends_the_wait_of_all(
    dispatcher: Dispatcher,
) -> None:
    database = Database(refused=10**9)
    tasks = waiting(database, dispatcher)
    await database.probed.wait()
    database.outage.end()
    assert await asyncio.gather(*tasks) == [True] * WAITING
    assert len(database.events.of(HandlerDatabaseRecovered)) == 1


async def test_a_stop_ends_the_wait(dispatcher: Dispatcher) -> None:
    database = Database(refused=10**9)
    tasks = waiting(database, dispatcher)
    await database.probed.wait()
    assert await dispatcher.stop(LONG) == []
    assert await asyncio.gather(*tasks) == [False] * WAITING
