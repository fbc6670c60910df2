"""At their start, relays and consumers wait for what they need, as they do later."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from outbox.testing.lifetime import free_port
from tests.acceptance.relays import as_role
from tests.acceptance.test_watching import Watched
from tests.fixtures.passwords import PASSWORD
from tests.fixtures.postgres import Template, migrate_for_a_week
from tests.fixtures.processes import (
    ROOT,
    Processes,
    RunningProcess,
    pillarbox_line,
)
from tests.fixtures.proxy import MakeProxy

pytestmark = pytest.mark.fault

APP = """
import os, time
from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker
from pillarbox import Consumer
from outbox.postgres.connection import sqlalchemy_url

if "TEST_IMPORT" in os.environ:
    print("importing", flush=True)
    time.sleep(float(os.environ["TEST_IMPORT"]))

driver = os.environ.get("TEST_DRIVER", "psycopg")
url = sqlalchemy_url(os.environ["TEST_URL"]).replace("psycopg", driver, 1)
if driver == "asyncpg":
    from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

    sessions = async_sessionmaker(create_async_engine(url))
elif driver == "pool":
    from psycopg_pool import ConnectionPool

    sessions = ConnectionPool(os.environ["TEST_URL"], min_size=1, max_size=65, open=False)
else:
    sessions = sessionmaker(create_engine(url))

consumer = Consumer(os.environ.get("TEST_BROKER", "memory://"), sessions, name="billing")

if driver == "asyncpg":
    @consumer.handles("orders")
    async def handle(session, message):
        raise AssertionError
elif driver == "pool":
    import psycopg

    @consumer.handles("orders")
    def handle(connection: psycopg.Connection, message):
        raise AssertionError
else:
    @consumer.handles("orders")
    def handle(session, message):
        raise AssertionError
"""
OFTEN = {"INTERVALS": "repeats=1.5"}
LISTEN = "--listen=127.0.0.1:0"
STARTED = {"relay": "RelayStarted", "consume": "ConsumerStarted"}

Run: TypeAlias = Callable[..., RunningProcess]


class Commands(Processes):
    """Starts `relay` and `consume` on the same database and broker."""

    def __init__(self, folder: Path) -> None:
        (folder / "app.py").write_text(APP)
        super().__init__(folder, "command", PYTHONPATH=f"{folder}:{ROOT}", **PASSWORD)

    def run(
        self,
        command: str,
        database: str,
        *options: str,
        broker: str = "memory://",
        **variables: str,
    ) -> RunningProcess:
        if command == "consume":
            urls = {"TEST_URL": database, "TEST_BROKER": broker}
            words: tuple[str, ...] = ("consume", "app:consumer")
        else:
            urls = {}
            words = ("relay", f"--database={database}", f"--broker={broker}")
        line = pillarbox_line(variables, *words, *options)
        return self.begin(line, **urls, **variables)


@pytest.fixture
def commands(tmp_path: Path) -> Any:
    with Commands(tmp_path) as started:
        yield started


@pytest.fixture(params=STARTED)
def command(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def expect_end(process: RunningProcess, status: int) -> None:
    assert process.wait(30) == status, process.log()


def expect_delay(watched: Watched, process: RunningProcess, reason: str) -> None:
    """The process lives, isn't ready, and says why at once and again."""
    process.wait_for_log("StartDelayed", times=2)
    status, (said, *more) = watched.ready()
    assert (status, more) == (503, [])
    assert said.startswith("start: ")
    assert re.search(reason, said)
    assert watched.get("/live") == (200, {"live": True})
    first, second = [
        line for line in process.log().splitlines() if "StartDelayed" in line
    ][:2]
    assert re.search(reason, first)
    assert "INFO" in first
    assert "waited=0s" in first
    assert "WARNING" in second
    assert "repeated=" in second
    assert "waited=0s" not in second


def test_a_command_waits_for_its_database(
    command: str, commands: Commands, database_url: str, proxy: MakeProxy
) -> None:
    database, url = proxy(database_url)
    database.refuse()
    process = commands.run(command, url, LISTEN, **OFTEN)
    watched = Watched(process)
    expect_delay(watched, process, "Connection refused")
    database.accept()
    process.wait_for_log(STARTED[command])
    watched.wait_until(200)
    process.terminate()
    expect_end(process, 0)


def test_a_stop_ends_the_wait_at_once(
    command: str, commands: Commands, database_url: str, proxy: MakeProxy
) -> None:
    database, url = proxy(database_url)
    database.refuse()
    process = commands.run(command, url)
    process.wait_for_log("StartDelayed")
    process.terminate()
    expect_end(process, 0)
    database.accept()
    database.stall()
    process = commands.run(command, url, LISTEN)
    watched = Watched(process)
    watched.wait_until(503, "start")
    process.terminate()
    # A thread that connects can't be cancelled.
    assert process.wait(15) == 0, process.log()


def test_the_wait_can_be_limited(
    command: str, commands: Commands, tmp_path: Path
) -> None:
    away = f"postgresql://me@127.0.0.1:{free_port()}/shop"
    process = commands.run(command, away, "--wait=1s")
    expect_end(process, 2)
    assert "StartDelayed" in process.log()
    assert "pillarbox: can't re" in process.log()
    process = commands.run(command, away, "--wait=0s")
    expect_end(process, 2)
    assert "StartDelayed" not in process.log()


def test_a_command_waits_for_the_migration(
    command: str, commands: Commands, template: Template, empty_database_url: str
) -> None:
    url = as_role(empty_database_url, "pillarbox_relay")
    if command == "consume":
        url = as_role(empty_database_url, "pillarbox_consumer")
    process = commands.run(command, url, LISTEN, **OFTEN)
    expect_delay(Watched(process), process, "no schema (in|out)box: run pillarbox mig")
    migrate_for_a_week(empty_database_url)
    process.wait_for_log(STARTED[command])
