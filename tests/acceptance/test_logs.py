"""Real processes log few, machine-readable lines without payloads."""

import json
from typing import Any

from pillarbox import Message
from tests.acceptance.relays import Relays
from tests.acceptance.sink import Sink
from tests.fixtures.processes import RunningProcess
from tests.fixtures.relay import insert
from tests.fixtures.site import Site
from tests.fixtures.waiting import wait_for

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"
JSON = "--log-format=json"
QUICK = {"INTERVALS": "log=1"}


def records(process: RunningProcess) -> list[dict[str, Any]]:
    # The last line may be incomplete.
    return [json.loads(line) for line in process.log().split("\n")[:-1]]


def fields_of(process: RunningProcess, event: str) -> list[dict[str, Any]]:
    return [it["fields"] for it in records(process) if it.get("event") == event]


def test_a_relay_summarizes_its_work_in_one_line(
    database_url: str, relays: Relays, sink: Sink
) -> None:
    relay = relays.start_without_waiting(sink.url, JSON, **QUICK)
    insert(database_url, *[Message("t", b"confidential") for _ in range(20)])

    def published() -> int:
        return sum(it["published"] for it in fields_of(relay, "RelayActive"))

    wait_for("all are reported", lambda: published() == 20, seconds=60)
    relay.terminate()
    assert relay.wait(60) == 0
    lines = fields_of(relay, "RelayActive")
    assert len(lines) <= 20
    for line in lines:
        assert line["published"] > 0
        assert 0 <= line["lag"] <= line["slowest"]
        assert line["lanes"] > 0
        assert line["period"] > 0
    assert {it["level"] for it in records(relay)} == {"INFO"}
    assert "confidential" not in relay.log()


async def test_a_consumer_summarizes_its_work_in_one_line_and_warns_with_a_remedy(
    site: Site,
) -> None:
    good = [Message("orders", b"confidential") for _ in range(20)]
    bad = Message("orders", b"bad", headers={"traceparent": TRACEPARENT})
    await site.publish(*good, bad)
    consumer = site.run("shop_app:consumer", JSON, **QUICK)

    def total(name: str) -> int:
        return sum(it[name] for it in fields_of(consumer, "ConsumerActive"))

    wait_for("all are reported", lambda: total("handled") == 20, seconds=60)
    wait_for("so is the bad one", lambda: total("dead_lettered") == 1, seconds=60)
    consumer.terminate()
    assert consumer.wait(60) == 0
    (line, *_) = fields_of(consumer, "ConsumerActive")
    assert line["consumer"] == "billing"
    assert 0 <= line["lag"] <= line["slowest"]
    (warning,) = [it for it in records(consumer) if it["level"] != "INFO"]
    assert (warning["level"], warning["event"]) == ("WARNING", "MessageDeadLettered")
    assert warning["trace_id"] == TRACE_ID
    assert warning["fields"]["id"] == str(bad.id)
    assert "pillarbox dead-letters retry" in warning["fields"]["remedy"]
    assert "confidential" not in consumer.log()
