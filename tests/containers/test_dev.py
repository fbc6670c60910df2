"""`pillarbox dev` with its PostgreSQL in a container."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import LiteralString

import psycopg
import pytest

from outbox.dev.project import Project
from outbox.dev.server import Container
from outbox.postgres.connection import conninfo
from tests.acceptance.test_dev import Dev, project
from tests.containers.engine import docker


@pytest.fixture
def folder() -> Iterator[Path]:
    """A project whose data are in a volume, whatever this machine has."""
    program = shutil.which("docker")
    assert program is not None
    with project() as folder:
        made = Project(folder)
        with made.locked():
            made.keep("server", lambda: program)
        yield folder
        Container(program, made).remove_volume()


@pytest.fixture
def devs(folder: Path) -> Iterator[list[Dev]]:
    """What was started there; ends what is left of it."""
    started: list[Dev] = []
    yield started
    for dev in started:
        dev.kill()


def started_in(folder: Path, devs: list[Dev], *arguments: str) -> Dev:
    devs.append(Dev(folder, *arguments))
    devs[-1].wait_for("RelayStarted")
    return devs[-1]


def rows(dev: Dev, statement: LiteralString) -> list[tuple[object, ...]]:
    with psycopg.connect(conninfo(dev.url)) as connection:
        done = connection.execute(statement)
        return done.fetchall() if done.description else []


def volumes() -> set[str]:
    return set(docker("volume", "ls", "--quiet").split())


def containers() -> set[str]:
    return set(docker("ps", "--all", "--format", "{{.Names}}").split())


def test_the_server_has_both_extensions_and_its_data_stay_until_a_reset(
    folder: Path, devs: list[Dev]
) -> None:
    before = volumes()
    dev = started_in(folder, devs, "app:consumer")
    (volume,) = volumes() - before
    dev.wait_for("ConsumerStarted")
    dev.send("the first order")
    dev.wait_for("consumer | billed the first order")
    extensions = "SELECT extname::text FROM pg_extension WHERE extname LIKE 'pg\\_%'"
    assert sorted(rows(dev, extensions)) == [("pg_cron",), ("pg_partman",)]
    rows(dev, "CREATE TABLE kept ()")
    url = dev.url
    assert dev.end(signal.SIGINT) == 0
    assert dev.left_over() == []
    assert volume not in containers()

    dev = started_in(folder, devs)
    assert dev.url == url
    assert rows(dev, "SELECT to_regclass('kept')::text") == [("kept",)]
    assert dev.end(signal.SIGTERM) == 0

    dev = started_in(folder, devs, "--reset")
    assert dev.url != url
    assert dev.end(signal.SIGINT) == 0
    assert volume not in volumes() | containers()
