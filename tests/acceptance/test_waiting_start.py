"""At their start, relays and consumers wait for what they need, as they do later."""

import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from redis import Redis

from pillarbox.outbox.testing.lifetime import free_port
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.acceptance.relays import as_role
from tests.acceptance.test_watching import Watched
from tests.fixtures.kafka import behind
from tests.fixtures.kafka_script import refusing_kafka
from tests.fixtures.passwords import PASSWORD, ask_for_passwords, set_password
from tests.fixtures.postgres import Template, migrate_for_a_week
from tests.fixtures.processes import (
    ROOT,
    Processes,
    RunningProcess,
    pillarbox_line,
)
from tests.fixtures.proxy import MakeProxy, Proxy
from tests.fixtures.sessions import execute
from tests.fixtures.sqs import Aws
from tests.fixtures.variants import in_turn
from tests.servers.nats import nats_server
from tests.servers.rabbitmq import RabbitMQServer
from tests.servers.redis import RedisServer
from tests.servers.sqs import SqsServer

pytestmark = pytest.mark.fault

APP = """
import os, threading
from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker
from pillarbox import Consumer
from pillarbox.outbox.brokers.plugins import implementation
from pillarbox.outbox.postgres.connection import sqlalchemy_url

if "TEST_IMPORT" in os.environ:
    print("importing", flush=True)
    threading.Event().wait()

source = os.environ["TEST_BROKER"]
if "TEST_OBJECT" in os.environ:
    make = implementation("pillarbox.sources", source)
    source = make(source, consumer="billing", topics=["orders.new"])
engine = create_engine(sqlalchemy_url(os.environ["TEST_URL"]))
consumer = Consumer(source, sessionmaker(engine), name="billing")

@consumer.handles("orders.new")
def handle(session, message):
    raise AssertionError
"""
BROKERS = {
    "redis": "redis_url",
    "nats": "private_nats",
    "rabbitmq": "shared_rabbitmq",
    "kafka": "private_mock",
    "sqs": "shared_sqs",
    "postgres": "other_url",
}
LONGEST_WAIT = 6.0
"""For 3 s; clients give up after about 10 s by themselves."""
OFTEN = {"INTERVALS": "repeats=1.5"}
LISTEN = "--listen=127.0.0.1:0"
STARTED = {"relay": "RelayStarted", "consume": "ConsumerStarted"}


def broker_of(
    kind: str, request: pytest.FixtureRequest, proxy: MakeProxy
) -> tuple[Proxy, str]:
    """Return a broker behind a proxy, and its URL."""
    if kind == "sqs":
        server: SqsServer = request.getfixturevalue("shared_sqs")
        made, through = proxy(server.endpoint_url)
        aws: Aws = request.getfixturevalue("aws")
        asyncio.run(aws.create_queue("orders-new"))
        return made, server.url("sqs", endpoint_url=through)
    found = request.getfixturevalue(BROKERS[kind])
    if kind == "kafka":
        return behind(proxy, found)
    return proxy(found if isinstance(found, str) else found.url)


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
        if command.startswith("consume"):
            urls = {"TEST_URL": database, "TEST_BROKER": broker}
            words: tuple[str, ...] = ("consume", "app:consumer")
        else:
            urls = {}
            words = ("relay", f"--database={database}", f"--broker={broker}")
        line = pillarbox_line(variables, *words, *options)
        return self.begin(line, **urls, **variables)


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
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
    process.wait_for_log("StartDelayed", times=3)
    status, (said, *more) = watched.ready()
    assert (status, more) == (503, [])
    assert said.startswith("start: ")
    assert re.search(reason, said)
    assert watched.get("/live") == (200, {"live": True})
    first, _, second = [
        line for line in process.log().splitlines() if "StartDelayed" in line
    ][:3]
    assert re.search(reason, first)
    assert "INFO" in first
    assert re.search(r"waited=\ds", first)
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


def test_the_wait_can_be_limited(command: str, commands: Commands) -> None:
    away = f"postgresql://me@127.0.0.1:{free_port()}/shop"
    process = commands.run(command, away, "--wait=1s")
    expect_end(process, 2)
    assert "StartDelayed" in process.log()
    assert "pillarbox: can't re" in process.log()
    process = commands.run(command, away, "--wait=0s")
    expect_end(process, 2)
    assert "StartDelayed" not in process.log()


@pytest.mark.parametrize(("kind", "command"), in_turn(["database", *BROKERS], STARTED))
def test_the_wait_ends_in_time_although_a_server_does_not_answer(
    kind: str,
    command: str,
    commands: Commands,
    database_url: str,
    proxy: MakeProxy,
    request: pytest.FixtureRequest,
) -> None:
    between, url, broker = *proxy(database_url), "memory://"
    if kind != "database":
        url = database_url
        between, broker = broker_of(kind, request, proxy)
    between.stall()
    process = commands.run(command, url, LISTEN, "--wait=3s", broker=broker)
    Watched(process).wait_until(503, "start")
    began = time.monotonic()
    assert process.wait(60) == 2, process.log()
    assert time.monotonic() - began < LONGEST_WAIT, process.log()
    # Some clients give up by themselves before.
    assert "doesn't answer" in process.log() or "StartDelayed" in process.log()


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


def test_a_command_waits_for_a_newer_schema(
    command: str, commands: Commands, database_url: str
) -> None:
    change = "UPDATE outbox.alembic_version SET version_num = %s RETURNING true"
    ((newest,),) = execute(
        database_url, "SELECT version_num FROM outbox.alembic_version"
    )
    execute(database_url, change, ["0007"])
    process = commands.run(command, database_url, LISTEN, **OFTEN)
    expect_delay(Watched(process), process, "has version 0007, .*: run pillarbox migr")
    execute(database_url, change, [newest])
    process.wait_for_log(STARTED[command])


def test_a_version_that_a_role_may_not_read_is_an_older_one(
    command: str, commands: Commands, database_url: str
) -> None:
    everybody = "TABLE outbox.alembic_version {} pillarbox_relay, pillarbox_consumer"
    execute(database_url, f"REVOKE SELECT ON {everybody.format('FROM')}")
    role = "pillarbox_relay" if command == "relay" else "pillarbox_consumer"
    process = commands.run(command, as_role(database_url, role))
    process.wait_for_log("the schema has an older version, but")
    execute(database_url, f"GRANT SELECT ON {everybody.format('TO')}")
    process.wait_for_log(STARTED[command])


def test_a_command_waits_until_the_database_accepts_writes(
    command: str, commands: Commands, database_url: str
) -> None:
    name = database_url.rpartition("/")[2]
    read_only = f"ALTER DATABASE {name} SET default_transaction_read_only"
    execute(database_url, f"{read_only} = on")
    process = commands.run(command, database_url, LISTEN, **OFTEN)
    expect_delay(Watched(process), process, "read-only")
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("SET default_transaction_read_only = off")
        connection.execute(f"{read_only} = off".encode())
    process.wait_for_log(STARTED[command])


@pytest.mark.parametrize(
    ("kind", "system"),
    in_turn(["relay", "consume", "consume with a source"], BROKERS),
)
def test_a_command_waits_for_its_broker(
    kind: str,
    system: str,
    commands: Commands,
    database_url: str,
    proxy: MakeProxy,
    request: pytest.FixtureRequest,
) -> None:
    broker, through = broker_of(system, request, proxy)
    broker.refuse()
    variables = {"TEST_OBJECT": "1"} if kind == "consume with a source" else {}
    process = commands.run(kind, database_url, LISTEN, broker=through, **variables)
    process.wait_for_log("StartDelayed")
    watched = Watched(process)
    status, (said,) = watched.ready()
    assert status == 503
    assert re.search("start: .*(can't be reached|refused)", said)
    broker.accept()
    process.wait_for_log(STARTED[kind.partition(" ")[0]])
    watched.wait_until(200)
    process.terminate()
    expect_end(process, 0)


def test_a_relay_waits_for_the_files_of_its_urls_and_for_the_right_passwords(
    commands: Commands,
    migrated_server: PostgresServer,
    private_redis: RedisServer,
    tmp_path: Path,
) -> None:
    url = migrated_server.url
    ask_for_passwords(url, "mary")
    with Redis.from_url(private_redis.url) as client:
        client.config_set("requirepass", "new")
    database, broker = tmp_path / "database", tmp_path / "broker"
    files = {
        "PILLARBOX_DATABASE_URL_FILE": str(database),
        "PILLARBOX_BROKER_URL_FILE": str(broker),
    }
    process = commands.begin(pillarbox_line({}, "relay"), **files)
    process.wait_for_log("DATABASE_URL_FILE=")
    database.touch()
    process.wait_for_log("is empty")
    mary = set_password(url, "mary", "new")
    database.write_text(mary.replace(":new@", ":old@"))
    process.wait_for_log("BROKER_URL_FILE=")
    broker.write_text(private_redis.url.replace("://", "://:old@"))
    process.wait_for_log("password authentication failed")
    database.write_text(mary)
    process.wait_for_log("rejected the connection")
    broker.write_text(private_redis.url.replace("://", "://:new@"))
    process.wait_for_log("RelayStarted")


def test_a_command_waits_for_the_file_of_its_password(
    command: str, commands: Commands, migrated_server: PostgresServer, tmp_path: Path
) -> None:
    ask_for_passwords(migrated_server.url, "mary")
    mary = set_password(migrated_server.url, "mary", "new")
    file = tmp_path / "pgpass"
    url = f"{mary.replace(':new@', '@')}?passfile={file}"
    process = commands.run(command, url, PGPASSWORD="")
    process.wait_for_log("no password supplied")
    file.write_text("*:*:*:mary:new\n")
    file.chmod(0o600)
    process.wait_for_log(STARTED[command])


def test_what_waiting_cannot_cure_ends_a_command_at_once(
    command: str, commands: Commands, migrated_server: PostgresServer, tmp_path: Path
) -> None:
    url = migrated_server.url
    ask_for_passwords(url, "mary")
    mary = set_password(url, "mary", "new")
    execute(url, "CREATE ROLE nobody LOGIN")
    database = url.rpartition("/")[2]
    execute(url, "CREATE ROLE stranger LOGIN")
    execute(url, f"REVOKE CONNECT ON DATABASE {database} FROM PUBLIC")
    execute(url, f"GRANT CONNECT ON DATABASE {database} TO nobody")
    for broken, said in (
        (mary.replace(":new@", ":old@"), "password authentication failed"),
        (url.replace("postgres@", "nobody@"), "GRANT pillarbox_"),
        (url.replace("postgres@", "stranger@"), "permission denied for database"),
        ("mysql://localhost", "use postgresql://|mysql"),
    ):
        process = commands.run(command, broken)
        expect_end(process, 2)
        assert "StartDelayed" not in process.log()
        assert re.search(said, process.log())
    for setting in (["--wait=later"], ["--listen=nowhere"]):
        process = commands.run(command, url, *setting)
        expect_end(process, 2)
        assert "StartDelayed" not in process.log()


def test_refused_passwords_of_brokers_end_a_command_at_once(
    command: str,
    commands: Commands,
    database_url: str,
    other_url: str,
    private_redis: RedisServer,
    shared_rabbitmq: RabbitMQServer,
) -> None:
    with Redis.from_url(private_redis.url) as client:
        client.config_set("requirepass", "new")
    user = {"user": "mary", "password": "new"}
    with (
        refusing_kafka() as port,
        nats_server({"authorization": {"users": [user]}}) as nats,
    ):
        for broker in (
            private_redis.url.replace("://", "://:old@"),
            shared_rabbitmq.url.replace("guest:guest", "guest:old"),
            f"{shared_rabbitmq.url.rstrip('/')}/nowhere",
            nats.url.replace("://", "://mary:old@"),
            f"kafka://mary:old@127.0.0.1:{port}/"
            "?security.protocol=SASL_PLAINTEXT&sasl.mechanism=PLAIN",
            other_url.replace("postgres@", "nobody@"),
            "unknown://host",
        ):
            process = commands.run(command, database_url, broker=broker)
            expect_end(process, 2)
            assert "StartDelayed" not in process.log()


def test_several_processes_wait_for_the_database(
    commands: Commands, database_url: str, proxy: MakeProxy
) -> None:
    database, url = proxy(database_url)
    database.refuse()
    process = commands.run("consume", url, "--processes=2", LISTEN)
    process.wait_for_log("StartDelayed")
    watched = Watched(process)
    status, (first, second) = watched.ready()
    assert status == 503
    assert re.fullmatch("start: .*refused.* of process 1", first)
    assert second == "answer of process 2"
    assert watched.get("/live") == (200, {"live": True})
    database.accept()
    process.wait_for_log("ConsumerStarted", times=2)
    watched.wait_until(200)
    process.terminate()
    expect_end(process, 0)


def test_a_stop_of_several_processes_ends_their_wait_and_their_imports(
    commands: Commands, database_url: str, proxy: MakeProxy
) -> None:
    database, url = proxy(database_url)
    database.refuse()
    for variables, said in (({}, "StartDelayed"), ({"TEST_IMPORT": "1"}, "importing")):
        process = commands.run("consume", url, "--processes=2", **variables)
        process.wait_for_log(said)
        process.terminate()
        expect_end(process, 0)


def test_a_limited_wait_ends_all_processes(commands: Commands) -> None:
    away = f"postgresql://me@127.0.0.1:{free_port()}/shop"
    process = commands.run("consume", away, "--processes=2", "--wait=1s")
    expect_end(process, 2)


def test_a_consumer_that_runs_once_waits_only_if_told_to(commands: Commands) -> None:
    away = f"postgresql://me@127.0.0.1:{free_port()}/shop"
    for options, waits in (([], False), (["--wait=1s"], True)):
        process = commands.run("consume", away, "--once", *options)
        expect_end(process, 2)
        assert ("StartDelayed" in process.log()) == waits
