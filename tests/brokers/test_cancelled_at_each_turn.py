"""A call to a broker that is cancelled at any moment leaves no connection behind.

The event loop is stepped: a call is cancelled before the first turn of its loop, then
before the second, and so on until it finishes before it is cancelled. This finds bugs
that need one unlucky moment, which random cancellation would find about once a month.
"""

import asyncio
import gc
import itertools
import re
from collections.abc import Callable, Coroutine, Set
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from pillarbox import Message
from pillarbox.relay.publisher import Publisher
from pillarbox.relay.publishers.http import HttpPublisher
from tests.fixtures.adapters import adapters_of
from tests.fixtures.http import Target
from tests.fixtures.sqs import fresh
from tests.fixtures.variants import as_variant
from tests.fixtures.waiting import wait_for


class Call(NamedTuple):
    """What is called, and the ports of its server."""

    run: Callable[[], Coroutine[Any, Any, object]]
    ports: frozenset[int]


_PATIENCE: Final = 60.0
# A connection that is left behind stays, and a check takes half as long as a turn.
_TURNS_UNTIL_CHECK: Final = 5


class _Loop(asyncio.SelectorEventLoop):
    """Cancels a task before one of its turns.

    The loop sleeps until there is something to do, so it has few turns, and each of
    them is a step of some task.
    """

    def __init__(self, turn: int | None) -> None:
        super().__init__()
        self.cancelled = False
        self.task: asyncio.Task[object] | None = None
        self._turns_left = turn

    def _run_once(self) -> None:
        if self.task is not None and self._turns_left is not None:
            self._turns_left -= 1
            if self._turns_left == 0:
                self.cancelled = self.task.cancel()
        super()._run_once()  # type: ignore[misc]


@pytest.fixture(autouse=True)
def little_to_collect() -> None:
    """Limit the many garbage collections here to the objects of this test."""
    gc.collect()
    gc.freeze()


def _ports_of(url: str) -> frozenset[int]:
    return frozenset(map(int, re.findall(r"(?:127\.0\.0\.1|localhost):(\d+)", url)))


@pytest.fixture
def call(request: pytest.FixtureRequest) -> Call:
    broker, _, kind = request.param.partition("_")
    enter: Callable[[], Publisher]
    if broker == "http":
        target: Target = request.getfixturevalue("target")
        url, topic = target.url(), "t"
        enter = partial(HttpPublisher.from_url, url)
    else:
        adapters = adapters_of(broker, request)
        url, enter, (topic, _) = adapters.url, adapters.publisher, adapters.topics
        consumer = fresh(broker)

    async def publish() -> None:
        async with enter() as publisher:
            await publisher.publish([Message(topic, b"1")])

    async def receive() -> None:
        async with adapters.source(consumer) as source:
            await source.receive(limit=1)

    return Call(publish if kind == "publisher" else receive, _ports_of(url))


@pytest.mark.parametrize(
    "call",
    [
        *("http_publisher", "kafka_source", "nats_source", "postgres_publisher"),
        *("rabbitmq_publisher", "redis_source"),
        *map(
            as_variant,
            (
                *("kafka_publisher", "nats_publisher", "postgres_source"),
                *("rabbitmq_source", "redis_publisher", "sqs_publisher", "sns_source"),
            ),
        ),
    ],
    indirect=True,
)
def test_a_call_cancelled_at_any_point_leaves_nothing_behind(call: Call) -> None:
    # The first call creates the objects that a library keeps for the whole process.
    _call_and_cancel(call, turn=None)
    assert call.ports
    sockets = _connections_to(call.ports)

    def all_closed() -> bool:
        # C libraries close sockets when objects are freed, some in a thread.
        gc.collect()
        return _connections_to(call.ports) <= sockets

    for turn in itertools.count(1):
        cancelled = _call_and_cancel(call, turn=turn)
        if turn % _TURNS_UNTIL_CHECK == 0 or not cancelled:
            last = f"all closed after turn {turn}, or one of the few before it"
            wait_for(last, all_closed, seconds=_PATIENCE)
        if not cancelled:
            break


def _call_and_cancel(call: Call, *, turn: int | None) -> bool:
    """Call, cancel before a turn of the loop, and return whether it was in time."""
    loop = _Loop(turn)

    async def main() -> None:
        loop.task = task = asyncio.ensure_future(call.run())
        await asyncio.wait({task}, timeout=_PATIENCE)
        assert task.done(), f"turn {turn}: {task}"
        assert task.cancelled() is loop.cancelled, f"turn {turn}: {task}"
        if not loop.cancelled:
            task.result()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:
            _, left = await asyncio.wait(left, timeout=_PATIENCE)
        assert not left, f"turn {turn}"

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())
    return loop.cancelled


def _connections_to(ports: Set[int]) -> set[str]:
    """Return the sockets of this process that are connected to one of these ports.

    Other tests may have left clients in this process that still connect elsewhere.
    """
    connected = {
        inode
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
        for _, _, remote, _, _, _, _, _, _, inode, *_ in [line.split()]
        if int(remote.partition(":")[2], 16) in ports
    }
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.add(str(descriptor.readlink()))
    return {f"socket:[{inode}]" for inode in connected} & found
