"""The private servers that tests, the demo and benchmarks start."""

import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from redis import Redis

from pillarbox.outbox.errors import ConfigError, DatabaseUnavailableError
from pillarbox.outbox.testing import cluster
from pillarbox.outbox.testing.lifetime import free_port, is_running, wait_until
from pillarbox.outbox.testing.postgres import PostgresServer, postgres_server
from tests.fixtures.sessions import execute
from tests.servers.redis import RedisServer, redis_server

# Starts both servers, prints their process ids and directories, and is killed.
OWNER = """
import os, signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import psycopg
from pillarbox.outbox.testing.postgres import postgres_server
from tests.servers.redis import redis_server

with postgres_server(durable=False) as postgres, redis_server() as redis:
    with psycopg.connect(postgres.url) as connection:
        row = connection.execute("SHOW data_directory").fetchone()
    data = Path(row[0])
    for pid_file in (data / "postmaster.pid", redis.pid_file):
        print(pid_file.read_text().splitlines()[0], pid_file.parent)
    os.sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def one(url: str, query: str) -> object:
    with psycopg.connect(url) as connection:
        row = connection.execute(query).fetchone()
        assert row is not None
        return row[0]


@pytest.mark.fault
def test_servers_stop_when_their_owner_is_killed() -> None:
    owner = subprocess.run(
        [sys.executable, "-c", OWNER], capture_output=True, text=True, check=False
    )
    assert owner.returncode == -9, owner.stderr
    lines = [line.split(" ", 1) for line in owner.stdout.splitlines()]
    assert len(lines) == 2
    pids = [int(pid) for pid, _ in lines]
    directories = [Path(directory) for _, directory in lines]
    assert wait_until(lambda: not any(map(is_running, pids)), seconds=20)
    assert wait_until(lambda: not any(map(Path.exists, directories)), seconds=20)


@pytest.mark.fault
@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_committed_data_survives_a_restart(
    private_server: PostgresServer, mode: cluster.StopMode
) -> None:
    with psycopg.connect(private_server.url) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 7 AS number")
    private_server.restart(mode)
    assert one(private_server.url, "SELECT number FROM kept") == 7


def test_pg_cron_runs_on_a_private_server(
    private_server: PostgresServer,
) -> None:
    with psycopg.connect(private_server.url) as connection:
        connection.execute("CREATE EXTENSION pg_cron")
    launcher = "SELECT count(*) FROM pg_stat_activity WHERE application_name ~ 'cron'"
    assert one(private_server.url, launcher) == 1


def test_settings_reach_the_server() -> None:
    with postgres_server(settings={"cluster_name": "it's \\ours"}) as ours:
        assert one(ours.url, "SHOW cluster_name") == "it's \\ours"


def test_a_database_is_a_copy_of_its_template_and_dropped_despite_open_sessions(
    server: PostgresServer,
) -> None:
    original = 'odd "name"/?'
    server.create_database(original)
    with psycopg.connect(server.database_url(original)) as connection:
        connection.execute("CREATE TABLE copied AS SELECT 7 AS number")
    server.create_database("its-copy", template=original)
    with psycopg.connect(server.database_url("its-copy")) as connection:
        assert connection.execute("SELECT number FROM copied").fetchone() == (7,)
        server.drop_database("its-copy")
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    server.drop_database(original)


def test_a_given_server_is_used_and_not_stopped(server: PostgresServer) -> None:
    with_driver = server.url.replace("://", "+psycopg://")
    with postgres_server(with_driver) as given:
        assert given.url == server.url
        with pytest.raises(ConfigError, match="not started here; omit the URL"):
            given.stop()
    assert one(server.url, "SELECT 1") == 1
    url = f"postgresql://someone:secret@127.0.0.1:{free_port()}/nowhere"
    with pytest.raises(DatabaseUnavailableError) as refusal, postgres_server(url):
        pass
    assert "secret" not in str(refusal.value)


def test_without_servers_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cluster, "server_directories", lambda: iter(()))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="postgresql-15-partman postgresql-15-cron"):
        cluster.find_binaries()
    with pytest.raises(ConfigError, match="install it"), redis_server():
        pass


@pytest.mark.fault
def test_redis_comes_back_empty_under_the_same_url(private_redis: RedisServer) -> None:
    with Redis.from_url(private_redis.url) as client:
        client.set("key", "value")
    private_redis.kill()
    private_redis.start()
    with Redis.from_url(private_redis.url) as client:
        assert client.get("key") is None
    private_redis.stop()
    private_redis.start()


def test_a_private_server_leaves_nothing_behind() -> None:
    with redis_server() as redis:
        directory = redis.pid_file.parent
        pid = int(redis.pid_file.read_text())
    assert not directory.exists()
    assert not is_running(pid)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_nobody_without_the_password_gets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGPASSWORD", raising=False)
    own = "from pillarbox.outbox.testing.cluster import RULES; print(RULES, end='')"
    rules = subprocess.check_output([sys.executable, "-c", own], text=True)
    monkeypatch.setattr(cluster, "RULES", rules)
    cluster.initialized.cache_clear()
    with postgres_server(durable=False) as private:
        assert one(private.url, "SELECT 1") == 1
        execute(private.url, "CREATE ROLE somebody LOGIN")
        address = private.url.partition("@")[2]
        for user in ("postgres", "postgres:guess", "somebody", "somebody:guess"):
            with pytest.raises(psycopg.OperationalError, match="password"):
                psycopg.connect(f"postgresql://{user}@{address}")
        ((directory,),) = execute(private.url, "SHOW unix_socket_directories")
        assert Path(directory).stat().st_mode & 0o077 == 0
    cluster.initialized.cache_clear()
