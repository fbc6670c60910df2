"""Whoever gives up on a broker at any moment leaves no connection behind.

The event loop is stepped: a call is cancelled before the first turn of its loop, then
before the second one, and so on until it ends before it is cancelled. That finds what
needs one unlucky moment, which a test that cancels at random would find once a month.
"""

import asyncio
import gc
import itertools
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest

from outbox import Message
from outbox.testing.sqs import SqsServer
from relay.publisher import Publisher
from relay.publishers.http import HttpPublisher
from relay.publishers.rabbitmq import RabbitMQPublisher
from relay.publishers.sqs import SqsPublisher
from tests.fixtures.http import Target
from tests.fixtures.sqs import Aws, fresh
from tests.fixtures.waiting import wait_for

Call: TypeAlias = Callable[[], Coroutine[Any, Any, object]]

_PATIENCE: Final = 60.0


class _Loop(asyncio.SelectorEventLoop):
    """Cancels a task before one of its turns.

    It sleeps until there is something to do, so that its turns are few, and each of
    them is a step of somebody.
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


def _publishing(make: Callable[[], Publisher], topic: str) -> Call:
    async def call() -> None:
        async with make() as publisher:
            await publisher.publish([Message(topic, b"1")])

    return call


@pytest.fixture
def http_publisher(target: Target) -> Call:
    return _publishing(lambda: HttpPublisher.from_url(target.url()), "t")


@pytest.fixture
def rabbitmq_publisher(rabbitmq_url: str) -> Call:
    return _publishing(lambda: RabbitMQPublisher.from_url(rabbitmq_url), "t")


@pytest.fixture
def sqs_publisher(shared_sqs: SqsServer, aws: Aws) -> Call:
    topic = fresh()
    asyncio.run(aws.create_queue(f"{topic}.fifo"))
    return _publishing(lambda: SqsPublisher.from_url(shared_sqs.url()), topic)


@pytest.fixture
def call(request: pytest.FixtureRequest) -> Call:
    found: Call = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize(
    "call",
    [
        "http_publisher",
        "rabbitmq_publisher",
        "sqs_publisher",
    ],
    indirect=True,
)
def test_a_call_cancelled_at_any_turn_leaves_nothing_behind(call: Call) -> None:
    _call_and_cancel(call, turn=None)  # what a library keeps for the process is made
    for turn in itertools.count(1):
        sockets = _open_sockets()
        if not _call_and_cancel(call, turn=turn):
            break
        # Libraries written in C close with their objects, and some in a thread.
        gc.collect()
        wait_for(
            f"all sockets closed after a cancel at turn {turn}",
            lambda: _open_sockets() <= sockets,  # noqa: B023
            seconds=_PATIENCE,
        )


def _call_and_cancel(call: Call, *, turn: int | None) -> bool:
    """Call, cancel before a turn of the loop, and tell whether that came in time."""
    loop = _Loop(turn)

    async def main() -> None:
        loop.task = task = asyncio.ensure_future(call())
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


def _open_sockets() -> set[str]:
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.add(str(descriptor.readlink()))
    return {each for each in found if each.startswith("socket:")}
