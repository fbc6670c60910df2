"""Given an unusable broker, both commands print one line, and exit with status 2."""

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest
from redis import Redis

from outbox.testing.lifetime import free_port
from outbox.testing.postgres import PostgresServer, postgres_server
from tests.fixtures.http import SECRET, SECRET_ENV
from tests.fixtures.kafka_script import refusing_kafka
from tests.fixtures.passwords import ask_for_passwords
from tests.fixtures.postgres import FEW_DAYS, Template, new_database
from tests.fixtures.processes import ROOT, RunningProcess, command_line
from tests.fixtures.rabbitmq import user
from tests.fixtures.sessions import execute
from tests.fixtures.sqs_script import error, scripted_sqs
from tests.servers.kafka import KafkaCluster
from tests.servers.nats import NatsServer, nats_server
from tests.servers.rabbitmq import RabbitMQServer
from tests.servers.redis import RedisServer
from tests.servers.sqs import SqsServer

PASSWORD = "hemlighet"
APP = """
import os
from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker
from pillarbox import Consumer
from outbox.postgres.connection import sqlalchemy_url

sessions = sessionmaker(create_engine(sqlalchemy_url(os.environ["TEST_URL"])))
consumer = Consumer(os.environ["TEST_BROKER"], sessions, name="billing")

@consumer.handles("orders")
def handle(session, message):
    raise AssertionError
"""
AWAY = {
    "amqp": "amqp://someone:{password}@127.0.0.1:{port}",
    "kafka": "kafka://127.0.0.1:{port}/",
    "nats": "nats://someone:{password}@127.0.0.1:{port}",
    "postgresql": "postgresql://someone:{password}@127.0.0.1:{port}/queue",
    "redis": "redis://:{password}@127.0.0.1:{port}/0",
    "sqs": "sqs://key:{password}@eu-west-1/?endpoint_url=http://127.0.0.1:{port}",
}
LIBRARIES = {
    "kafka": "confluent_kafka",
    "nats": "nats",
    "rabbitmq": "pika",
    "redis": "redis",
    "sqs": "aiobotocore",
}

TRY_BOTH = f"""
import os, sys
from outbox.cli.main import main

for broker in sys.argv[1:]:
    url = os.environ["TEST_BROKER"] = f"{{broker}}://someone:{PASSWORD}@127.0.0.1"
    assert main(["relay", f"--broker={{url}}"]) == 2
    sys.modules.pop("shop_app", None)
    assert main(["consume", "shop_app:consumer"]) == 2
"""


@pytest.fixture(scope="module")
def database_url(server: PostgresServer, template: Template) -> Iterator[str]:
    """One database for all: a command that refuses to start changes nothing in it."""
    with new_database(server, "pillarbox_refusals", template, ahead=FEW_DAYS) as name:
        yield server.database_url(name)


class Commands:
    """Starts processes that must refuse to start, and returns the line they write.

    Attributes:
        modules: a folder that comes first on their import path.
    """

    def __init__(self, database_url: str, folder: Path) -> None:
        self.modules = folder / "modules"
        self.modules.mkdir()
        (self.modules / "shop_app.py").write_text(APP)
        self._database_url = database_url
        self._folder = folder
        self._numbers = itertools.count()

    def relay(self, broker: str, **environment: str) -> str:
        return self._line(self._relay(broker, environment))

    def consume(self, broker: str) -> str:
        return self._line(self._consume(broker))

    def both(self, broker: str) -> Sequence[str]:
        """Return the line of each, started at the same time."""
        started = [self._relay(broker, {}), self._consume(broker)]
        return [self._line(process) for process in started]

    def _relay(self, broker: str, environment: Mapping[str, str]) -> RunningProcess:
        options = f"--database={self._database_url}", f"--broker={broker}"
        return self._start(environment, "relay", *options)

    def _consume(self, broker: str) -> RunningProcess:
        environment = {"TEST_URL": self._database_url, "TEST_BROKER": broker}
        return self._start(environment, "consume", "shop_app:consumer")

    def _start(self, environment: Mapping[str, str], *arguments: str) -> RunningProcess:
        return RunningProcess(
            command_line("pillarbox", *arguments),
            self._folder / f"{next(self._numbers)}.log",
            {"PYTHONPATH": f"{self.modules}:{ROOT}", **environment},
        )

    def _line(self, process: RunningProcess) -> str:
        try:
            assert process.wait() == 2, process.log()
        finally:
            process.kill()
        (line,) = process.log().splitlines()
        assert line.startswith("pillarbox: ")
        assert PASSWORD not in line
        return line


@pytest.fixture
def commands(database_url: str, tmp_path: Path) -> Commands:
    return Commands(database_url, tmp_path)


@contextmanager
def user_who_may_make(server: RabbitMQServer, names: str) -> Iterator[str]:
    """Yield the URL of a user who can use everything, and declare these names."""
    name = f"user-{uuid4().hex}"
    with user(server, name, PASSWORD, names):
        yield server.url.replace("guest:guest", f"{name}:{PASSWORD}")


@pytest.mark.parametrize(
    "broker",
    [
        f"redis://:{PASSWORD}@[::1",
        f"nats://{PASSWORD}@host:port",
        # From a byte on the command line that is not valid UTF-8.
        f"postgresql://someone:{PASSWORD}@host/\udcff",
    ],
    ids=ascii,
)
def test_the_error_for_an_invalid_url_is_one_line(
    broker: str, commands: Commands
) -> None:
    for line in commands.both(broker):
        assert " URL " in line


@pytest.mark.parametrize("scheme", AWAY)
def test_an_unavailable_broker_is_named(scheme: str, commands: Commands) -> None:
    port = free_port()
    for line in commands.both(AWAY[scheme].format(password=PASSWORD, port=port)):
        assert "can't be reached" in line or "can't reach" in line
        assert f"127.0.0.1:{port}" in line


def test_an_unavailable_receiver_is_named(commands: Commands) -> None:
    port = free_port()
    address = f"http://someone:{PASSWORD}@127.0.0.1:{port}/hook"
    broker = f"{address}?secret_env={SECRET_ENV}&allow_private=true"
    line = commands.relay(broker, **{SECRET_ENV: SECRET})
    assert f"127.0.0.1:{port}/hook can't be reached" in line


def test_redis_refuses_a_wrong_and_a_missing_password(
    private_redis: RedisServer, commands: Commands
) -> None:
    with Redis.from_url(private_redis.url) as client:
        client.config_set("requirepass", "another")
    wrong = private_redis.url.replace("://", f"://:{PASSWORD}@")
    for line in (*commands.both(wrong), *commands.both(private_redis.url)):
        assert "rejected the connection" in line
        assert private_redis.url.partition("://")[2] in line


def test_rabbitmq_refuses_a_wrong_password(
    shared_rabbitmq: RabbitMQServer, commands: Commands
) -> None:
    wrong = shared_rabbitmq.url.replace("guest:guest", f"guest:{PASSWORD}")
    for line in commands.both(wrong):
        assert "rejected the connection" in line


@pytest.fixture(scope="module")
def guarded_nats() -> Iterator[NatsServer]:
    """A server that asks for a password."""
    only = {"authorization": {"user": "someone", "password": "another"}}
    with nats_server(only) as server:
        yield server


@pytest.mark.parametrize("user", [f"someone:{PASSWORD}@", f"{PASSWORD}@"])
def test_nats_refuses_a_wrong_user_and_a_wrong_token(
    user: str, guarded_nats: NatsServer, commands: Commands
) -> None:
    for line in commands.both(guarded_nats.url.replace("://", f"://{user}")):
        assert "rejected the connection" in line


@pytest.fixture(scope="module")
def guarded_postgres() -> Iterator[PostgresServer]:
    """A server that asks one role for a password."""
    with postgres_server(durable=False) as server:
        execute(server.url, "CREATE ROLE someone LOGIN PASSWORD 'another'")
        ask_for_passwords(server.url, "someone")
        yield server


def test_postgres_refuses_a_wrong_password(
    guarded_postgres: PostgresServer, commands: Commands
) -> None:
    address = guarded_postgres.url.partition("@")[2]
    for line in commands.both(f"postgresql://someone:{PASSWORD}@{address}"):
        assert "password authentication failed" in line
        assert f"postgresql://someone@{address}" in line


def test_kafka_refuses_a_wrong_password(commands: Commands) -> None:
    with refusing_kafka() as port:
        lines = commands.both(
            f"kafka://someone:{PASSWORD}@127.0.0.1:{port}/"
            "?security.protocol=SASL_PLAINTEXT&sasl.mechanism=PLAIN"
        )
    for line in lines:
        assert f"broker kafka://127.0.0.1:{port} rejected the connection: " in line
        assert "said the script" in line


async def test_aws_refuses_a_wrong_secret(commands: Commands) -> None:
    async with scripted_sqs() as sqs:
        sqs.other = error("SignatureDoesNotMatch", 403)
        url = sqs.url().replace("key:secret", f"key:{PASSWORD}")
        lines = await asyncio.to_thread(commands.both, url)
    for line in lines:
        assert "SignatureDoesNotMatch" in line
        assert "give them in the URL, sqs://key:secret@region/" in line


def test_a_read_only_postgres_is_named(database_url: str, commands: Commands) -> None:
    read_only = f"{database_url}?options=-cdefault_transaction_read_only%3Don"
    for line in commands.both(read_only):
        assert "in a read-only transaction" in line
        assert database_url.partition("@")[2] in line


def test_the_error_for_missing_aws_credentials_says_how_to_set_them(
    shared_sqs: SqsServer, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    bare = f"sqs://eu-west-1/?endpoint_url={shared_sqs.endpoint_url}"
    for line in commands.both(bare):
        assert "credentials" in line
        assert "sqs://key:secret@region/" in line


def test_a_consumers_missing_queue_is_named(
    shared_sqs: SqsServer, commands: Commands
) -> None:
    line = commands.consume(f"{shared_sqs.url()}&queue=missing-queue")
    assert "missing-queue" in line


def test_a_missing_stream_is_named(shared_nats: NatsServer, commands: Commands) -> None:
    for line in commands.both(f"{shared_nats.url}?stream=MISSING"):
        assert "stream 'MISSING'" in line
        assert "create the stream" in line


def test_a_consumers_topic_that_is_in_no_stream_is_named(commands: Commands) -> None:
    with nats_server() as server:
        assert "orders" in commands.consume(server.url)


def test_a_consumers_missing_topic_is_named(
    mock_kafka: KafkaCluster, commands: Commands
) -> None:
    line = commands.consume(f"{mock_kafka.url}/?allow.auto.create.topics=false")
    assert "orders" in line


def test_a_missing_exchange_that_the_user_cannot_create_is_named(
    shared_rabbitmq: RabbitMQServer, commands: Commands
) -> None:
    with user_who_may_make(shared_rabbitmq, "^billing") as url:
        for line in commands.both(f"{url}?exchange=missing-exchange"):
            assert "exchange 'missing-exchange'" in line


def test_a_consumers_missing_queue_that_it_cannot_create_is_named(
    shared_rabbitmq: RabbitMQServer, commands: Commands
) -> None:
    with user_who_may_make(shared_rabbitmq, "^nothing$") as url:
        line = commands.consume(f"{url}?queue=missing-queue")
    assert "queue 'missing-queue' doesn't exist and can't be created: " in line
    assert "access" in line.lower()


def hide(module: str, modules: Path) -> None:
    """Make a library appear missing to processes that import from `modules` first."""
    missing = f"raise ModuleNotFoundError({module!r}, name={module!r})\n"
    (modules / f"{module}.py").write_text(missing)


def test_the_error_for_a_missing_library_says_how_to_install_it(
    database_url: str, commands: Commands
) -> None:
    for library in LIBRARIES.values():
        hide(library, commands.modules)
    ours = {
        "PYTHONPATH": f"{commands.modules}:{ROOT}",
        "PILLARBOX_DATABASE_URL": database_url,
        "TEST_URL": database_url,
    }
    tried = subprocess.run(
        [sys.executable, "-c", TRY_BOTH, *LIBRARIES],
        check=False,
        env=os.environ | ours,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert tried.returncode == 0, tried.stdout
    assert PASSWORD not in tried.stdout
    expected = [each for each in LIBRARIES.items() for _ in ("relay", "inbox")]
    lines = tried.stdout.splitlines()
    for line, (extra, library) in zip(lines, expected, strict=True):
        assert line.startswith("pillarbox: ")
        assert f"run pip install 'pillarbox[{extra}]'" in line
        assert library in line


def test_the_error_for_a_missing_webhook_library_names_the_extra(
    commands: Commands,
) -> None:
    hide("aiohttp", commands.modules)
    line = commands.relay("https://127.0.0.1/hook")
    assert "run pip install 'pillarbox[http]'" in line


def test_the_error_for_an_unknown_scheme_lists_the_known_ones(
    commands: Commands,
) -> None:
    for line in commands.both(f"pigeon://someone:{PASSWORD}@coop"):
        assert "'pigeon'" in line
        assert "installed: amqp, amqps, " in line
        assert "pip install 'pillarbox[…]' with one of " in line
        for extra in LIBRARIES:
            assert extra in line.rpartition(" of ")[2]
