"""The PostgreSQL server of the tests: a URL, else Docker, else a local cluster."""

import subprocess
import sys

import psycopg
import pytest

from outbox.testing import postgres
from outbox.testing.container import Container
from outbox.testing.postgres import PostgresServer, postgres_server
from tests.containers.engine import docker
from tests.fixtures.waiting import wait_for

# Starts a container, prints its name, and is killed.
OWNER = """
import os, signal
from outbox.testing.container import private_container

with private_container({}) as container:
    print(container.name, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_docker_with_the_image_is_used_unless_a_url_is_given() -> None:
    with postgres_server(durable=False) as server:
        assert isinstance(server._instance, Container)
        assert "pg_cron" in shown(server, "shared_preload_libraries")
        with postgres_server(server.url) as given:
            assert given._instance is None
            assert given.url == server.url


def test_without_an_image_a_local_cluster_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(postgres, "docker_has_the_image", lambda: False)
    with postgres_server(durable=False) as server:
        assert not isinstance(server._instance, Container)


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_committed_data_survives_a_restart_of_the_container(
    mode: postgres.StopMode,
) -> None:
    with postgres_server(docker=True, settings={"work_mem": "7MB"}) as server:
        with psycopg.connect(server.url) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 1 AS n")
        server.restart(mode)
        with psycopg.connect(server.url) as connection:
            assert connection.execute("SELECT n FROM kept").fetchall() == [(1,)]
        assert shown(server, "work_mem") == "7MB"


def test_a_container_is_removed_when_its_owner_is_killed() -> None:
    owner = subprocess.run(
        [sys.executable, "-c", OWNER], capture_output=True, text=True, check=False
    )
    assert owner.returncode == -9, owner.stderr
    name = owner.stdout.strip()
    wait_for("the end of the container", lambda: not found(name), seconds=120)


def shown(server: PostgresServer, setting: str) -> str:
    with psycopg.connect(server.url) as connection:
        row = connection.execute(f"SHOW {setting}").fetchone()
    assert row is not None
    return str(row[0])


def found(name: str) -> str:
    return docker("ps", "--all", "--quiet", "--filter", f"name={name}")
