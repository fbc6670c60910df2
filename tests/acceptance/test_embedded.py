"""Relay and consumer in the process of an application, as README and pages show."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy.orm import Session, sessionmaker
from typing_extensions import override

from pillarbox import Consumer, DeadLetter, Message, Relay, add
from pillarbox.inbox.events import (
    ConsumerStarted,
    HandlerFailed,
    MessageDeadLettered,
    MessageHandled,
)
from pillarbox.inbox.source import Delivery
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.inbox.webhook import WebhookApp
from pillarbox.outbox.errors import ConfigError, OutboxError
from pillarbox.outbox.events import Event, Observer, ProcessFailed
from pillarbox.outbox.observability.health import Health
from pillarbox.outbox.testing.events import RecordedEvents
from pillarbox.relay.events import BatchSettled, RelayStarted
from pillarbox.relay.publishers.memory import MemoryPublisher
from tests.fixtures.consumers import numbered, sessions_of
from tests.fixtures.http import SECRET


async def test_both_take_urls_and_log_what_their_commands_would(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pillarbox")
    events = RecordedEvents()
    with sessions_of(database_url) as sessions:
        consumer = Consumer(database_url, sessions, name="billing")
        consumer.observe(events)

        @consumer.handles("orders.placed")
        def bill(session: Session, message: Message) -> None:
            if message.payload == b"no":
                raise DeadLetter

        async with consumer, Relay(database_url, "memory://drop"):
            with sessions.begin() as session:
                for payload in (b"yes", b"no"):
                    add(session, Message("orders.placed", payload))
            await events.wait_for(MessageHandled)
            await events.wait_for(MessageDeadLettered)

    logged = [record.message.partition(" ")[0] for record in caplog.records]
    assert logged.count(MessageDeadLettered.__name__) == 1
    assert RelayStarted.__name__ in logged
    assert HandlerFailed.__name__ not in logged


class Breakable(MemorySource):
    """A third party's source, which can raise what a source shouldn't."""

    is_broken = False

    @override
    async def receive(self, *, limit: int) -> Sequence[Delivery]:
        if self.is_broken:
            raise RuntimeError("a bug")
        return await super().receive(limit=limit)


@asynccontextmanager
async def embedded(url: str, side: str, *observers: Observer) -> AsyncIterator[Any]:
    """Run a process of this side in the background of the block."""
    if side == "relay":
        async with Relay(url, MemoryPublisher(), observers=observers) as relay:
            yield relay
        return
    with sessions_of(url) as sessions:
        source = Breakable(*numbered(4), poll_interval=timedelta(milliseconds=10))
        consumer = Consumer(source, sessions, name="billing", observers=observers)

        @consumer.handles("*")
        def handle(session: Session, message: Message) -> None: ...

        async with consumer:
            yield consumer


def raising(event: Event) -> None:
    raise ValueError("a bug in an observer")


def cancelling(event: Event) -> None:
    raise asyncio.CancelledError


def failing_a_test(event: Event) -> None:
    pytest.fail("an assertion")


@pytest.mark.parametrize("observer", [raising, cancelling, failing_a_test])
async def test_an_observer_that_fails_is_reported_and_harmless(
    database_url: str, observer: Observer, caplog: pytest.LogCaptureFixture
) -> None:
    events = RecordedEvents()
    async with embedded(database_url, "consumer", observer, events) as consumer:
        await events.wait_for(MessageHandled, 4)
        assert consumer.is_running
    assert f"ObserverFailed observer={observer.__qualname__}" in caplog.text


async def test_an_observer_that_fails_does_not_stop_a_relay(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    events = RecordedEvents()
    async with embedded(database_url, "relay", raising, events):
        with sessions_of(database_url) as sessions, sessions.begin() as session:
            add(session, *numbered(4))
        await events.wait_for(BatchSettled)
    assert "ObserverFailed observer=raising" in caplog.text


async def write_later(event: Event) -> None: ...


class Writer:
    async def __call__(self, event: Event) -> None: ...


@pytest.mark.parametrize("observer", [write_later, Writer(), partial(write_later)])
def test_a_coroutine_function_is_refused_as_an_observer(observer: Any) -> None:
    sessions = sessionmaker[Session]()
    secrets = [SECRET]

    def handle(session: Session, message: Message) -> None: ...

    for make in (
        lambda: Consumer("memory://", sessions, name="billing", observers=[observer]),
        lambda: Consumer("memory://", sessions, name="billing").observe(observer),
        lambda: Relay("postgresql://", MemoryPublisher(), observers=[observer]),
        lambda: WebhookApp(
            handle, sessions, name="hook", secrets=secrets, observers=[observer]
        ),
    ):
        with pytest.raises(ConfigError, match=r"observer .*: is async, but observers"):
            make()
    with pytest.raises(ConfigError, match=r"observer NoneType: can't be called"):
        Consumer("memory://", sessions, name="billing", observers=[None])  # type: ignore[list-item]


@pytest.mark.parametrize("side", ["consumer", "relay"])
@pytest.mark.parametrize("reason", ["RuntimeError", "its task was cancelled"])
async def test_an_end_before_that_of_the_block_is_reported_and_can_be_asked(
    database_url: str,
    side: str,
    reason: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def sweep(*_: object) -> None:
        await broken.wait()
        raise RuntimeError("a bug")

    broken = asyncio.Event()
    monkeypatch.setattr("pillarbox.outbox.log.process.sweep_lanes", sweep)
    events = RecordedEvents()
    health = Health(RelayStarted if side == "relay" else ConsumerStarted)
    with pytest.raises((RuntimeError, OutboxError, ExceptionGroup)):  # noqa: PT012 (of the block)
        async with embedded(database_url, side, events, health) as process:
            assert process.is_running
            assert health.waits_for == []
            if reason == "RuntimeError":
                broken.set()
                monkeypatch.setattr(Breakable, "is_broken", True)
            else:
                name = f"{type(process).__name__}.run "
                (task,) = [
                    it for it in asyncio.all_tasks() if name in repr(it.get_coro())
                ]
                task.cancel()
            (failed,) = await events.wait_for(ProcessFailed)
            assert reason in failed.reason
            assert not process.is_running
            assert "restart" in health.waits_for
            assert "ProcessFailed" in caplog.text
