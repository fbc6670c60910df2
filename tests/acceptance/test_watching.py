"""Both processes report their health, and exit when their event loop is stuck."""

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psycopg

from pillarbox import Message
from tests.acceptance.relays import Relays
from tests.fixtures.processes import RunningProcess
from tests.fixtures.prometheus import metrics_port
from tests.fixtures.proxy import MakeProxy
from tests.fixtures.sessions import execute
from tests.fixtures.site import Site
from tests.fixtures.waiting import wait_for

STUCK = """
import asyncio, os, threading
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from pillarbox import Consumer
from pillarbox.outbox.postgres.connection import sqlalchemy_url

URL = os.environ.get("TEST_URL", "postgresql://")
consumer = Consumer(
    URL, async_sessionmaker(create_async_engine(sqlalchemy_url(URL))), name="billing"
)

@consumer.handles("orders")
async def block_the_loop(session, message):
    threading.Event().wait()

class Codec:
    name = "stuck"

    def encode(self, message):
        return "1", message.payload

    def decode(self, message, key_id):
        threading.Event().wait()

codec = Codec()
"""
INSERT_STUCK = """
    INSERT INTO outbox.message (id, lane, topic, content_type, headers, payload)
    VALUES (outbox.uuid7(), 16, 'orders', 'application/octet-stream',
            '{"pillarbox-codec": "stuck:1", "pillarbox-content-type": "a/b"}', '')
"""


class Watched:
    """A process with a health port."""

    def __init__(self, process: RunningProcess) -> None:
        self._url = f"http://127.0.0.1:{metrics_port(process)}"

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        try:
            with urllib.request.urlopen(f"{self._url}{path}", timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def ready(self) -> tuple[int, list[str]]:
        status, said = self.get("/ready")
        return status, said["waits_for"]

    def wait_until(self, status: int, *waits_for: str) -> None:
        expected = (status, list(waits_for))
        wait_for(f"{expected}", lambda: self.ready() == expected, seconds=60)
        assert self.get("/live") == (200, {"live": True})


async def test_a_consumer_is_ready_while_it_reaches_its_database_and_its_broker(
    site: Site, proxy: MakeProxy
) -> None:
    broker, broker_url = proxy(site.url)
    database, database_url = proxy(site.url)
    process = site.run(
        "shop_app:consumer",
        "--listen=127.0.0.1:0",
        TEST_BROKER=broker_url,
        TEST_URL=database_url,
    )
    watched = Watched(process)
    watched.wait_until(200)
    broker.refuse()
    watched.wait_until(503, "source of batch", "source of default")
    broker.accept()
    watched.wait_until(200)

    database.refuse()
    await site.publish(Message("orders", b"1"))
    watched.wait_until(503, "database")
    database.accept()
    watched.wait_until(200)
    wait_for("it is handled", lambda: site.effects() == ["1"], seconds=60)


def test_an_idle_relay_is_ready_while_it_reaches_its_database_and_its_broker(
    database_url: str, other_url: str, tmp_path: Path, proxy: MakeProxy
) -> None:
    database, url = proxy(database_url)
    broker, broker_url = proxy(other_url)
    with Relays(url, tmp_path) as relays:
        watched = Watched(
            relays.start(
                broker_url,
                "--listen=127.0.0.1:0",
                INTERVALS="broker_check=0.2",
            )
        )
        watched.wait_until(200)
        for proxied, name in ((database, "database"), (broker, "broker")):
            proxied.refuse()
            watched.wait_until(503, name)
            proxied.accept()
            watched.wait_until(200)


async def test_a_process_that_stops_is_not_ready(site: Site) -> None:
    await site.publish(Message("orders", b"wait", key="k"))
    with psycopg.connect(site.url, autocommit=True) as gate:
        gate.execute("SELECT pg_advisory_lock(1)")
        process = site.run("shop_app:make", "--listen=127.0.0.1:0")
        watched = Watched(process)
        process.wait_for_log("waiting")
        watched.wait_until(200)
        process.terminate()
        watched.wait_until(503, "end")
        gate.execute("SELECT pg_advisory_unlock(1)")
        assert process.wait(60) == 0


async def test_a_handler_that_blocks_the_loop_ends_the_consumer(
    site: Site, tmp_path: Path
) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    await site.publish(Message("orders", b""))
    process = site.run("stuck:consumer", "--watchdog=1s")
    assert process.wait(60) == 70, process.log()
    assert "the event loop has been blocked for 1 s" in process.log()
    assert "in block_the_loop" in process.log()
    assert site.unacked() == 1


def test_a_codec_that_blocks_the_loop_ends_the_relay(
    database_url: str, relays: Relays, tmp_path: Path
) -> None:
    (tmp_path / "installed" / "stuck.py").write_text(STUCK)
    execute(database_url, INSERT_STUCK)
    relay = relays.start_without_waiting(
        "memory://", "--codec=stuck:codec", "--watchdog=1s"
    )
    assert relay.wait(60) == 70, relay.log()
    assert "the event loop has been blocked for 1 s" in relay.log()
    assert "in decode" in relay.log()
