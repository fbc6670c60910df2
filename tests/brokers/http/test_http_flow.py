"""Posting to webhooks: order, connections and failing hosts."""

import asyncio
from collections import Counter
from uuid import UUID

import pytest
from aiohttp import web

from pillarbox import Message
from pillarbox.outbox.errors import BrokerUnavailableError
from pillarbox.relay.publisher import Acked, Nacked
from pillarbox.relay.publishers.http import HttpPublisher
from tests.fixtures.consumers import numbered
from tests.fixtures.http import Arrival, Target, publish, take, until_answered
from tests.fixtures.waiting import answer_after

ONE = Message("orders", b"1")


async def test_different_keys_run_concurrently_and_one_key_in_sequence(
    target: Target,
) -> None:
    under_way: Counter[str | None] = Counter()
    most: Counter[str | None] = Counter()

    async def script(arrival: Arrival) -> web.StreamResponse:
        key = arrival.message().key
        under_way[key] += 1
        most[key] = max(most[key], under_way[key])
        await target.crowd(4)
        await answer_after(0.005)
        under_way[key] -= 1
        return web.Response(status=204)

    target.script = script
    batch = numbered(200, keys=20)
    answers = await publish(target, *batch, options="max_connections=4")
    assert answers == [Acked()] * 200
    assert set(most.values()) == {1}
    assert target.most_at_once == 4
    assert len({arrival.connection for arrival in target.arrivals}) == 4
    by_key = {m.key: [n.id for n in target.messages() if n.key == m.key] for m in batch}
    assert by_key == {m.key: [n.id for n in batch if n.key == m.key] for m in batch}


async def test_concurrent_calls_share_the_connections(target: Target) -> None:
    async def script(arrival: Arrival) -> web.StreamResponse:
        await target.crowd(3)
        await answer_after(0.005)
        return web.Response(status=204)

    target.script = script
    url = target.url("max_connections=3")
    async with HttpPublisher.from_url(url) as publisher:
        batches = [[Message("t", b"") for _ in range(20)] for _ in range(3)]
        assert (
            await asyncio.gather(*map(publisher.publish, batches))
            == [[Acked()] * 20] * 3
        )
    assert len(target.arrivals) == 60
    assert target.most_at_once == 3


async def test_a_connection_closed_while_idle_is_not_an_outage(
    target: Target,
) -> None:
    async def script(arrival: Arrival) -> web.StreamResponse:
        if len(target.arrivals) == 2:
            # As a server does whose idle timeout ends just as a request arrives.
            assert isinstance(arrival.connection, asyncio.Transport)
            arrival.connection.close()
        return web.Response(status=204)

    target.script = script
    async with HttpPublisher.from_url(target.url()) as publisher:
        for message in numbered(3):
            assert await publisher.publish([message]) == [Acked()]


async def test_a_host_that_refuses_everything_gets_no_more_requests(
    target: Target,
) -> None:
    async def script(arrival: Arrival) -> web.StreamResponse:
        return web.Response(status=503)

    target.script = script
    batch = numbered(400, keys=100)
    async with HttpPublisher.from_url(target.url("max_connections=8")) as publisher:
        with pytest.raises(BrokerUnavailableError, match="keeps refusing messages"):
            await publisher.publish(batch)
        assert len(target.arrivals) < 20
        target.arrivals.clear()
        target.most_at_once = 0
        with pytest.raises(BrokerUnavailableError, match="keeps refusing messages"):
            await publisher.publish(batch)
        assert len(target.arrivals) <= 3
        assert target.most_at_once == 1
        target.script = take
        assert await publisher.publish(batch) == [Acked()] * 400


async def test_a_message_refused_alone_is_charged_until_the_host_could_be_the_cause(
    target: Target,
) -> None:
    async def script(arrival: Arrival) -> web.StreamResponse:
        refused = arrival.message() == ONE
        return web.Response(status=502 if refused else 204)

    target.script = script
    async with HttpPublisher.from_url(target.url()) as publisher:
        for _ in range(4):
            (answer,) = await publisher.publish([ONE])
            assert isinstance(answer, Nacked)
        for _ in range(3):
            with pytest.raises(BrokerUnavailableError, match="HTTP 502"):
                await publisher.publish([ONE])
        assert await publisher.publish([Message("t", b"")]) == [Acked()]
        (answer,) = await publisher.publish([ONE])
        assert isinstance(answer, Nacked)


async def test_a_message_refused_repeatedly_is_charged_once_others_succeed(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pillarbox.relay.publishers.http.host._DOUBT", 0.0)
    bad = [Message("bad", b"", key=f"bad {n}") for n in range(30)]
    good = [Message("good", b"", key=f"good {n}") for n in range(3)]

    async def script(arrival: Arrival) -> web.StreamResponse:
        refused = arrival.message().topic == "bad"
        return web.Response(status=500 if refused else 204)

    target.script = script
    async with HttpPublisher.from_url(target.url()) as publisher:
        answers = await until_answered(publisher, *bad, *good)
    assert [isinstance(answer, Acked) for answer in answers] == [False] * 30 + [
        True
    ] * 3
    assert Counter(m.id for m in target.messages("good")) == {m.id: 1 for m in good}


async def test_a_silent_host_is_unavailable_and_accepted_messages_are_not_repeated(
    target: Target,
) -> None:
    stalled = asyncio.Event()
    one, *others = numbered(30, keys=30)

    async def script(arrival: Arrival) -> web.StreamResponse:
        if arrival.message() == one and not stalled.is_set():
            await asyncio.Event().wait()
        return web.Response(status=204)

    target.script = script
    async with HttpPublisher.from_url(target.url("timeout=2s")) as publisher:
        async with asyncio.timeout(60):
            with pytest.raises(BrokerUnavailableError, match="no answer in time"):
                await publisher.publish([one, *others])
        stalled.set()
        assert await publisher.publish([one, *others]) == [Acked()] * 30
    times = Counter(message.id for message in target.messages())
    assert times == {m.id: 1 for m in others} | {one.id: 2}


async def test_messages_accepted_in_a_cancelled_call_are_not_repeated(
    target: Target,
) -> None:
    async def script(arrival: Arrival) -> web.StreamResponse:
        await answer_after(0.01)
        return web.Response(status=204)

    target.script = script
    batch = numbered(100)
    calls = 0
    async with HttpPublisher.from_url(target.url()) as publisher:
        async with asyncio.timeout(60):
            while True:
                calls += 1
                try:
                    async with asyncio.timeout(0.7):
                        answers = await publisher.publish(batch)
                        break
                except TimeoutError:
                    continue
    assert calls > 1
    assert answers == [Acked()] * 100
    times = Counter(message.id for message in target.messages())
    assert set(times) == {message.id for message in batch}
    assert sum(times.values()) <= 100 + calls


async def test_a_suspect_does_not_delay_the_others(target: Target) -> None:
    bad, *others = numbered(5, keys=5)
    tried: list[UUID] = []

    async def script(arrival: Arrival) -> web.StreamResponse:
        tried.append(arrival.message().id)
        if tried[-1] == bad.id:
            await asyncio.Event().wait()
        return web.Response(status=204)

    target.script = script
    async with HttpPublisher.from_url(target.url("timeout=2s")) as publisher:
        with pytest.raises(BrokerUnavailableError):
            await publisher.publish([bad])
        with pytest.raises(BrokerUnavailableError):
            await publisher.publish([bad, *others])
        assert set(tried[1:-1]) == {message.id for message in others}
        assert await publisher.publish(others) == [Acked()] * 4
    assert len(tried) == 6
