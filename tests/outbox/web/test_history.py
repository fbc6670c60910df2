"""The charts of the last hour, from the counters of the processes."""

import asyncio
import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from pillarbox import Consumer, Message
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.observability.counters import MOST_TOPICS, OTHERS, TopicCounters
from pillarbox.outbox.observability.latency import LONG
from pillarbox.outbox.observability.measures.backlog import Backlog
from pillarbox.outbox.observability.measures.consumers import ConsumerStatus
from pillarbox.outbox.observability.measures.processes import Process, Processes
from pillarbox.outbox.observability.overview import Overview
from pillarbox.outbox.web.history import History
from tests.fixtures.consumers import id_of, running, sessions_by
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.readers import add_consumer
from tests.fixtures.relay import insert
from tests.fixtures.relay import running as running_relay
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for
from tests.fixtures.web import browsing

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
FAST, SLOW = LONG.index(0.1), LONG.index(5)


def buckets(**counts: int) -> list[int]:
    found = [0] * (len(LONG) + 1)
    found[FAST], found[SLOW] = counts.get("fast", 0), counts.get("slow", 0)
    return found


def process(counters: dict[str, Any], **more: Any) -> Process:
    values: dict[str, Any] = dict.fromkeys(Process.__dataclass_fields__)
    values |= {"kind": "consumer", "name": "billing", "host": "h", "since": NOON}
    return Process(**(values | {"counters": counters} | more))


def overview(seconds: float, *found: Process, waiting: int = 0) -> Overview:
    values: dict[str, Any] = dict.fromkeys(Overview.__dataclass_fields__)
    lag = Backlog(messages=waiting, estimated=waiting)
    consumer = ConsumerStatus(
        name="billing", is_reader=True, replicas=1, lag=lag, held=None, rate=None
    )
    running = Processes(
        relays=tuple(it for it in found if it.kind == "relay"),
        consumers=tuple(it for it in found if it.kind != "relay"),
        lanes=0,
        free=(),
        readers={},
    )
    values |= {"processes": running, "consumers": (consumer,), "outbox": Backlog()}
    return Overview(**(values | {"at": NOON + timedelta(seconds=seconds)}))


def values(history: History, of: str = "") -> dict[str, list[float | None]]:
    return {it.title: list(it.values) for it in history.charts(of)}


@pytest.fixture
def history() -> History:
    return History(cast("Any", None))


@pytest.mark.parametrize("odd", [["orders"], {"orders": 1}, {"orders": [1, 2]}])
def test_counters_of_another_form_are_left_out_and_others_are_counted(
    history: History, odd: Any
) -> None:
    sound = {"orders": [0, 0, buckets()]}, {"orders": [60, 0, buckets(fast=60)]}
    for seconds, counters in zip((0, 30), sound, strict=True):
        strange = process(odd, name="strange", host="other")
        history.add(overview(seconds, strange, process(counters)))
    assert values(history)["Handled"][-1] == 2.0


def test_the_rates_are_those_since_the_last_measurement(history: History) -> None:
    assert history.charts("") == []
    history.add(overview(0, process({"a": [500, 10, buckets(fast=500)]})))
    assert history.since == NOON
    assert set(values(history)["Handled"]) == {None}, "what was before isn't counted"
    counters = {"a": [530, 13, buckets(fast=530)], "b": [30, 0, buckets(slow=30)]}
    history.add(overview(30, process(counters), waiting=7))
    shown = values(history)
    assert (shown["Handled"][-1], shown["Failed"][-1]) == (2.0, 0.1)
    assert shown["Backlog"][-1] == 7
    assert values(history, "topic:b")["Handled"][-1] == 1.0
    assert values(history, "consumer:billing")["Handled"][-1] == 2.0
    fast, slow = (values(history, f"topic:{it}") for it in "ab")
    latency = "p95, commit to handled"
    assert (fast[latency][-1] or 9) <= 0.1
    assert 2.5 <= (slow[latency][-1] or 0) <= 5


def test_a_process_that_starts_later_counts_from_its_start(history: History) -> None:
    relay = {"kind": "relay", "name": "main"}
    history.add(overview(0))
    new = process({"a": [40, 0, buckets()]}, since=NOON + timedelta(seconds=5), **relay)
    old = process({"a": [900, 0, buckets()]}, since=NOON - timedelta(days=1), **relay)
    history.add(overview(20, new, old))
    assert values(history)["Published"][-1] == 2.0
    again = replace(new, since=NOON + timedelta(seconds=30))
    history.add(overview(40, replace(again, counters={"a": [20, 0, buckets()]})))
    assert values(history)["Published"][-1] == 60 / 40


def test_a_minute_that_was_not_measured_is_a_gap_and_an_hour_is_kept(
    history: History,
) -> None:
    for minute in (0, 1, 2, 5, 6):
        counters = {"a": [60 * minute, 0, buckets()]}
        history.add(overview(60 * minute, process(counters)))
    (handled,) = (it for it in history.charts("") if it.title == "Handled")
    assert list(handled.values[-5:]) == [1.0, None, None, 1.0, 1.0]
    assert len(list(handled.lines)) == 2
    assert re.fullmatch(r"1.0/s now, at most 1.0/s at 12:0\d UTC", handled.words)
    history.add(overview(3600 * 3, process({"a": [9000, 0, buckets()]})))
    (handled,) = (it for it in history.charts("") if it.title == "Handled")
    assert [it for it in handled.values if it] == [(9000 - 360) / (3 * 3600 - 360)]


def test_a_process_counts_a_few_topics_and_nothing_that_json_cant_hold() -> None:
    counters = TopicCounters()
    for n in range(MOST_TOPICS + 5):
        counters.done(f"t{n}")
    for topic in ("nul \0", "half \ud800", "long" * 100, "t0"):
        counters.done(topic)
    counters.failed("t0")
    found = json.loads(counters.as_json())
    assert found["t0"][:2] == [2, 1]
    assert found[OTHERS][0] == 5 + 3
    assert len(found) == MOST_TOPICS + 1


async def test_relay_and_consumer_record_what_they_have_done(database_url: str) -> None:
    async def handle(session: Any, message: Message) -> None:
        if message.topic == "bad":
            raise ValueError("no")

    counters = "SELECT counters -> '{}' FROM {}.process WHERE counters ? '{}'"
    async with running_relay(database_url, ScriptedPublisher()) as relay:
        insert(database_url, Message("good", 1), Message("good", 2))
        del relay
        query = counters.format("good", "outbox", "good")
        await asyncio.to_thread(
            wait_for, "a beat", lambda: execute(database_url, query)
        )
        ((found,),) = execute(database_url, query)
        assert found[:2] == [2, 0]
    async with sessions_by(database_url, "asyncpg") as sessions:
        now = datetime.now(UTC)
        added = now - timedelta(days=2)
        scheduled = Message("late", 1, id=id_of(added), available_at=now)
        source = MemorySource(Message("good", 1), scheduled, Message("bad", 1))
        consumer = Consumer(source, sessions, name="billing")
        consumer.handles("*")(handle)
        async with running(consumer):
            query = "SELECT counters FROM inbox.process WHERE counters ?& '{bad,late}'"
            await asyncio.to_thread(
                wait_for, "a beat", lambda: execute(database_url, query)
            )
            ((found,),) = execute(database_url, query)
            assert found["bad"][0] == 0
            assert found["bad"][1] >= 1
            assert found["good"][0] == sum(found["good"][2]) == 1
            assert found["late"][0] == 1
            assert sum(found["late"][2][:-1]) == 1, "not counted from two days ago"


def test_the_page_draws_the_charts_and_says_them_in_words(database_url: str) -> None:
    add_consumer(database_url, "billing", "a")
    with browsing(database_url) as browser:
        browser.wait_until_shown("/overview", "<svg")
        assert browser.text.count("<svg") == 5
        assert 'aria-label="Handled: none"' in browser.text
        assert "known since" in browser.text
        assert "consumer:billing" in browser.text
