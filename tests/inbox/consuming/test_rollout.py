"""A rolling deploy: messages for which only other replicas have a handler."""

from datetime import timedelta
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from examples.sealed.aes_gcm import AesGcm
from pillarbox import Consumer, Message
from pillarbox.inbox.consuming.rollout import Rollout
from pillarbox.inbox.events import (
    CodecMissing,
    DeliveryReturned,
    HandlerFailed,
    HandlerMissing,
    MessageDeadLettered,
    MessageHandled,
    SourceWarned,
)
from pillarbox.inbox.sources.memory import MemoryDelivery, MemorySource
from pillarbox.outbox.administration.connection import administration
from pillarbox.outbox.administration.readers import add_reader
from pillarbox.outbox.payload.payload_codec import encoded
from tests.fixtures.consumers import consuming, numbered, running, sessions_by
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute
from tests.fixtures.urls import with_options

pytestmark = pytest.mark.timeout(180)

TERMS: dict[str, dict[str, Any]] = {
    "single": {},
    "batch": {"batch": 10},
    "job": {"lease": timedelta(seconds=10)},
}


async def handle(session: Any, one_or_many: Any) -> None:
    """Handle anything."""


async def refuse_to_hand_back(_: object, delay: timedelta) -> bool:
    return False


@pytest.mark.parametrize("kind", TERMS)
@pytest.mark.parametrize("is_newer", [False, True], ids=["new topic", "new version"])
async def test_a_message_without_a_handler_waits_for_another_replica(
    database_url: str, kind: str, is_newer: bool
) -> None:
    strange = (
        Message("orders", b"0", key="k", schema_version=2)
        if is_newer
        else Message("reports", b"0", key="k")
    )
    source = MemorySource(strange, Message("orders", b"1", key="other"))
    terms = {**TERMS[kind], "version": 1}
    async with consuming(database_url, source, handle, terms, topic="orders") as events:
        await events.wait_for(MessageHandled)
        await events.wait_for(DeliveryReturned, 2)
    assert source.waiting == 1
    assert not events.of(MessageDeadLettered)
    (missing,) = events.of(HandlerMissing)
    assert missing.topic == strange.topic
    assert (
        "newer than the handler of" if is_newer else "no handler for"
    ) in missing.reason
    assert execute(database_url, "SELECT count(*) FROM inbox.dead_letter") == [(0,)]
    newer = {"version": 2 if is_newer else 1}
    async with consuming(database_url, source, handle, newer) as events:
        handled = await events.wait_for(MessageHandled)
    assert [event.id for event in handled] == [strange.id]


async def test_after_the_rollout_the_messages_of_the_topic_are_dead_lettered_at_once(
    database_url: str,
) -> None:
    source = MemorySource(Message("reports", b"0"))
    async with consuming(
        database_url,
        source,
        handle,
        topic="orders",
        rollout=timedelta(milliseconds=300),
    ) as events:
        await events.wait_for(DeliveryReturned)
        await events.wait_for(MessageDeadLettered)
        source.add(Message("reports", b"1"))
        letters = await events.wait_for(MessageDeadLettered, 2)
    assert len(events.of(DeliveryReturned)) == 1
    for letter in letters:
        assert "no handler for topic 'reports'" in letter.reason
        assert "pillarbox readers drop" in letter.reason


@pytest.mark.parametrize("kind", TERMS)
@pytest.mark.parametrize("can_hand_back", [True, False])
async def test_an_encoded_message_waits_for_a_consumer_with_a_codec_and_is_not_given_up(
    database_url: str, monkeypatch: pytest.MonkeyPatch, kind: str, can_hand_back: bool
) -> None:
    codec = AesGcm({"here": AESGCM.generate_key(256)})
    secret = encoded(Message("orders", b"0", key="k"), codec)
    plain = Message("orders", b"1", key="other")
    source = MemorySource(secret, plain)
    with monkeypatch.context() as patched:
        if not can_hand_back:
            patched.setattr(MemoryDelivery, "hand_back", refuse_to_hand_back)
        async with consuming(
            database_url, source, handle, TERMS[kind], rollout=timedelta(0)
        ) as events:
            (missing,) = await events.wait_for(CodecMissing)
            if can_hand_back:
                await events.wait_for(DeliveryReturned, 2)
            (handled,) = await events.wait_for(MessageHandled)
    assert "'aes-gcm'" in missing.reason
    assert "codec=codec" in missing.reason
    assert handled.id == plain.id
    assert not events.of(HandlerFailed)
    assert not events.of(MessageDeadLettered)
    async with consuming(
        database_url, source, handle, TERMS[kind], codec=codec
    ) as events:
        (handled,) = await events.wait_for(MessageHandled)
    assert handled.id == secret.id


async def test_messages_behind_it_in_its_key_stay_behind_it(database_url: str) -> None:
    first, second = Message("reports", b"0", key="k"), Message("orders", b"1", key="k")
    source = MemorySource(first, second)
    async with consuming(database_url, source, handle, topic="orders") as events:
        await events.wait_for(DeliveryReturned)
        assert source.waiting == 2
        assert not events.of(MessageHandled)
    async with consuming(database_url, source, handle) as events:
        handled = await events.wait_for(MessageHandled, 2)
    assert [event.id for event in handled] == [first.id, second.id]


async def test_a_flood_of_a_new_topic_does_not_stop_a_replica_without_its_handler(
    database_url: str,
) -> None:
    flood = [Message("reports", b"") for _ in range(3000)]
    source = MemorySource(*flood, Message("orders", b""))
    async with consuming(
        database_url, source, handle, topic="orders", max_waiting=10
    ) as events:
        await events.wait_for(MessageHandled)
    assert not events.of(MessageDeadLettered)
    assert source.waiting == len(flood)


@pytest.mark.parametrize("rollout", [900, 0.3], ids=["goes on", "ends"])
async def test_what_can_not_be_handed_back_waits_here_and_is_no_dead_letter(
    database_url: str, monkeypatch: pytest.MonkeyPatch, rollout: float
) -> None:
    monkeypatch.setattr(MemoryDelivery, "hand_back", refuse_to_hand_back)
    first, second = Message("reports", b"0", key="k"), Message("orders", b"1", key="k")
    other = Message("orders", b"2", key="other")
    source = MemorySource(first, second, other)
    async with consuming(
        database_url,
        source,
        handle,
        topic="orders",
        rollout=timedelta(seconds=rollout),
    ) as events:
        await events.wait_for(HandlerMissing)
        if rollout < 1:
            (letter,) = await events.wait_for(MessageDeadLettered)
            assert letter.id == first.id
            handled = await events.wait_for(MessageHandled, 2)
            assert {event.id for event in handled} == {second.id, other.id}
            return
        (before,) = await events.wait_for(MessageHandled)
        assert before.id == other.id
    assert not events.of(MessageDeadLettered)
    async with consuming(database_url, source, handle) as events:
        rest = await events.wait_for(MessageHandled, 2)
    assert [event.id for event in rest] == [first.id, second.id]


def test_a_message_comes_back_the_less_often_the_longer_the_rollout_lasts() -> None:
    now = 100.0
    rollout = Rollout(timedelta(minutes=15), clock=lambda: now)
    waits: list[float] = []
    while (wait := rollout.wait("reports")) is not None:
        waits.append(wait.total_seconds())
        now += waits[-1]
    assert waits[:3] == [1, 1, 1]
    assert waits[3:10] == sorted(waits[3:10])
    assert max(waits) == 60
    assert sum(waits) == pytest.approx(900, abs=0.2)
    assert len(waits) < 30
    assert rollout.wait("others") is not None


async def test_replicas_of_two_releases_share_a_topic_without_a_dead_letter(
    database_url: str,
) -> None:
    source = with_options(database_url, lease="2s")

    def release(sessions: Any, *topics: str) -> Consumer:
        consumer = Consumer(source, sessions, name="billing")
        for topic in topics:
            consumer.handles(topic)(handle)
        return consumer

    async with sessions_by(database_url, "asyncpg") as sessions:
        old, new = release(sessions, "orders"), release(sessions, "orders", "reports")
        async with running(old) as of_old, running(new) as of_new:
            count, handled = 0, list[MessageHandled]()
            while not of_old.of(DeliveryReturned):
                insert(database_url, *numbered(40, keys=40, topic="reports"))
                count += 40
                handled = await of_new.wait_for(MessageHandled, count)
    assert len({event.id for event in handled}) == count
    assert not of_old.of(MessageDeadLettered)


async def test_a_consumer_names_the_subscriptions_that_no_handler_takes(
    database_url: str,
) -> None:
    topics = ["orders", "reports", "orders.paid", "orders.*", "paid.*", "ord*"]
    with administration(database_url, application_name="test") as admin:
        add_reader(admin, "billing", topics, for_consumer=True)
    async with sessions_by(database_url, "asyncpg") as sessions:
        consumer = Consumer(database_url, sessions, name="billing")
        for topic in ("orders", "orders.*"):
            consumer.handles(topic)(handle)
        async with running(consumer) as events:
            warnings = await events.wait_for(SourceWarned, 2)
    assert all("pillarbox readers drop" in warning.reason for warning in warnings)
    named = [warning.reason.split(",")[0] for warning in warnings]
    assert sorted(named) == [
        "no handler for 'paid.*'",
        "no handler for 'reports'",
    ]
