"""Concurrent retries of dead letters, and their metrics in Prometheus."""

import re
from functools import partial

import pytest

from pillarbox import Message
from tests.acceptance.relays import Relays, as_role
from tests.acceptance.sink import Sink
from tests.fixtures.dead_letters import give_up
from tests.fixtures.processes import RunningProcess
from tests.fixtures.prometheus import scrape
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute
from tests.fixtures.site import Site
from tests.fixtures.waiting import wait_for

LETTERS = 120
pytestmark = pytest.mark.timeout(300)


def pending(url: str, schema: str) -> int:
    ((count,),) = execute(
        url, f"SELECT count(*) FROM {schema}.dead_letter WHERE status = 'PENDING'"
    )
    return int(count)


def retried(log: str) -> int:
    return sum(int(n) for n in re.findall(r"RetryRunEnded .*?succeeded=(\d+)", log))


@pytest.mark.fault
def test_two_relays_and_two_commands_at_once_publish_each_dead_letter_once(
    database_url: str, relays: Relays, sink: Sink
) -> None:
    give_up(database_url, *[Message("t", b"1", key="k") for _ in range(LETTERS)])
    retrying = [
        relays.start(sink.url, "--dead-letter-interval=1s", "--listen=0"),
        relays.start(sink.url, "--dead-letter-interval=1s", "--listen=0"),
    ]
    command = ("dead-letters", "retry", "--side=outbox", "--topic=*")
    commands = [relays.command(*command, broker=sink.url) for _ in "12"]
    assert [it.wait(60) for it in commands] == [0, 0]
    wait_for("all succeed", lambda: not pending(database_url, "outbox"), seconds=60)
    for relay in retrying:
        relay.terminate()
        assert relay.wait(60) == 0, relay.log()
    assert (sink.count(), sink.duplicates()) == (LETTERS, 0)


@pytest.mark.long
@pytest.mark.fault
def test_two_consumers_with_a_schedule_have_each_effect_once(site: Site) -> None:
    execute(site.url, "GRANT INSERT ON effect TO pillarbox_consumer")
    messages = [Message("orders", str(n).encode()) for n in range(LETTERS)]
    give_up(site.url, *messages, schema="inbox")
    options = ("shop_app:consumer", "--dead-letter-interval=1s")
    roles = {
        "TEST_URL": as_role(site.url, "pillarbox_consumer"),
        "TEST_BROKER": as_role(site.url, "pillarbox_relay"),
    }
    started = [site.run(*options, **roles) for _ in range(2)]
    wait_for(
        "the runs of both have ended",
        lambda: sum(retried(consumer.log()) for consumer in started) == LETTERS,
        seconds=60,
    )
    for consumer in started:
        consumer.terminate()
        assert consumer.wait(60) == 0, consumer.log()
    assert not pending(site.url, "inbox")
    assert sorted(map(int, site.effects())) == list(range(LETTERS))


def test_a_relay_exports_what_it_published_and_its_dead_letters_to_prometheus(
    database_url: str, relays: Relays, sink: Sink
) -> None:
    give_up(database_url, Message("t", b"1"), origin="relay:main")
    messages = [Message(topic, b"1") for topic in ("a", "a", "b", "c")]
    insert(database_url, *messages)
    relay = relays.start(sink.url, "--listen=0")
    published = "pillarbox_relay_messages_published_total"
    for wanted in (
        f'{published}{{topic="a"}} 2.0',
        f'{published}{{topic="c"}} 1.0',
        "pillarbox_relay_lanes 48.0",
        "pillarbox_relay_breaker_open 0.0",
        "pillarbox_relay_add_to_publish_seconds_count 4.0",
        ',origin="relay:main",schema="outbox"} 1.0',
    ):
        wait_for(wanted, partial(is_exported, wanted, relay), seconds=60)
    assert "\ndead_letter_age_seconds{" in scrape(relay)


async def test_a_consumer_exports_what_became_of_its_messages_to_prometheus(
    site: Site,
) -> None:
    good, bad = Message("orders", b"good"), Message("orders", b"bad")
    head, behind = (Message("orders", it, key="customer 7") for it in (b"later", b"1"))
    await site.publish(good, bad, good, head, behind)
    consumer = site.run("shop_app:consumer", "--listen=0", INTERVALS="metrics=0.1")
    origin = 'origin="consumer:billing",schema="inbox"'
    labels = '{consumer="billing",topic="orders"} 1.0'
    for wanted in (
        f"pillarbox_consumer_messages_handled_total{labels}",
        f"pillarbox_consumer_messages_duplicate_total{labels}",
        f"pillarbox_consumer_messages_dead_lettered_total{labels}",
        f"pillarbox_consumer_handler_duration_seconds_count{labels}",
        'pillarbox_consumer_blocked_keys{consumer="billing"} 1.0',
        'pillarbox_events_total{consumer="billing",event="MessageHandled"} 1.0',
        f",{origin}}} 1.0",
        "\npillarbox_database_measured_timestamp_seconds{",
        '\npillarbox_findings{check="failures",',
        'pillarbox_consumer_blocked_key_age_seconds{consumer="billing"}',
    ):
        wait_for(wanted, partial(is_exported, wanted, consumer), seconds=60)
    assert "\ndead_letter_age_seconds{" in scrape(consumer)


def is_exported(wanted: str, process: RunningProcess) -> bool:
    return wanted in scrape(process)
