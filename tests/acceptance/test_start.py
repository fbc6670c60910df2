"""With an unusable database or broker, a command prints one line and exits with 2."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest
from redis import Redis

from pillarbox.outbox.cli.main import main
from pillarbox.outbox.testing.lifetime import free_port
from tests.fixtures.http import SECRET, SECRET_ENV
from tests.fixtures.kafka_script import refusing_kafka
from tests.fixtures.processes import ROOT
from tests.fixtures.rabbitmq import user
from tests.servers.rabbitmq import RabbitMQServer
from tests.servers.redis import RedisServer
from tests.servers.sqs import SqsServer

PASSWORD = "hemlighet"
APP = """
import os
from sqlalchemy import NullPool, create_engine
from sqlalchemy.orm import sessionmaker
from pillarbox import Consumer
from pillarbox.outbox.postgres.connection import sqlalchemy_url

engine = create_engine(sqlalchemy_url(os.environ["TEST_URL"]), poolclass=NullPool)
consumer = Consumer(os.environ["TEST_BROKER"], sessionmaker(engine), name="billing")

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
    "http": "aiohttp",
}
TRY_ALL = f"""
import os, sys
from pillarbox.outbox.cli.main import main

for broker in sys.argv[1:]:
    url = os.environ["TEST_BROKER"] = f"{{broker}}://someone:{PASSWORD}@127.0.0.1"
    assert main(["relay", f"--broker={{url}}"]) == 2
    sys.modules.pop("shop_app", None)
    if broker != "http":
        assert main(["consume", "shop_app:consumer"]) == 2
"""

Refuse = Callable[..., str]
Both = Callable[[str], Sequence[str]]


@pytest.fixture
def refuse(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Refuse:
    """Runs a command that must refuse to start, and returns the line it prints."""
    monkeypatch.setenv("PILLARBOX_RELAY_WAIT", "0s")
    monkeypatch.setenv("PILLARBOX_CONSUME_WAIT", "0s")

    def run(*arguments: str) -> str:
        assert main(arguments) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        (line,) = printed.err.splitlines()
        assert line.startswith("pillarbox: ")
        assert PASSWORD not in line
        return line

    return run


@pytest.fixture
def relay(database_url: str, refuse: Refuse) -> Refuse:
    """Runs a relay to a broker."""
    return lambda broker: refuse(
        "relay", f"--database={database_url}", f"--broker={broker}"
    )


@pytest.fixture
def consume(
    database_url: str, refuse: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Refuse:
    """Runs a consumer of a broker."""
    (tmp_path / "shop_app.py").write_text(APP)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TEST_URL", database_url)

    def run(broker: str) -> str:
        monkeypatch.delitem(sys.modules, "shop_app", raising=False)
        monkeypatch.setenv("TEST_BROKER", broker)
        return refuse("consume", "shop_app:consumer")

    return run


@pytest.fixture
def both(relay: Refuse, consume: Refuse) -> Both:
    """Runs both, and returns the line of each."""
    return lambda broker: [relay(broker), consume(broker)]


@contextmanager
def user_who_may_make(server: RabbitMQServer, names: str) -> Iterator[str]:
    """Yield the URL of a user who can use everything, and declare these names."""
    name = f"user-{uuid4().hex}"
    with user(server, name, PASSWORD, names):
        yield server.url.replace("guest:guest", f"{name}:{PASSWORD}")


def test_an_unusable_database_is_named_with_a_remedy(
    refuse: Refuse, empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PILLARBOX_BROKER_URL", raising=False)
    away = f"postgresql://someone:{PASSWORD}@127.0.0.1:{free_port()}/shop"
    for database, broker, words in (
        (away, "memory://", "can't reach the database postgresql://someone@127.0.0.1"),
        ("mysql://root@localhost/shop", "memory://", "use postgresql://"),
        (empty_database_url, "memory://", "run pillarbox migrate"),
        (empty_database_url, "", "PILLARBOX_BROKER_URL"),
    ):
        assert words in refuse("relay", f"--database={database}", f"--broker={broker}")


def test_a_broker_without_tables_is_named_with_a_remedy(
    relay: Refuse, empty_database_url: str
) -> None:
    assert "run pillarbox migrate" in relay(empty_database_url)


@pytest.mark.parametrize(
    "broker",
    [
        f"redis://:{PASSWORD}@[::1",
        # From a byte on the command line that is not valid UTF-8.
        f"postgresql://someone:{PASSWORD}@host/\udcff",
    ],
    ids=ascii,
)
def test_the_error_for_an_invalid_url_is_one_line(broker: str, both: Both) -> None:
    for line in both(broker):
        assert " URL " in line


@pytest.mark.parametrize("scheme", AWAY)
def test_an_unavailable_broker_is_named(scheme: str, both: Both) -> None:
    port = free_port()
    for line in both(AWAY[scheme].format(password=PASSWORD, port=port)):
        assert "can't be reached" in line or "can't reach" in line
        assert f"127.0.0.1:{port}" in line


def test_an_unavailable_receiver_is_named(
    relay: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET_ENV, SECRET)
    port = free_port()
    address = f"http://someone:{PASSWORD}@127.0.0.1:{port}/hook"
    line = relay(f"{address}?secret_env={SECRET_ENV}&allow_private=true")
    assert f"127.0.0.1:{port}/… can't be reached" in line


def test_redis_refuses_a_wrong_and_a_missing_password(
    private_redis: RedisServer, both: Both
) -> None:
    with Redis.from_url(private_redis.url) as client:
        client.config_set("requirepass", "another")
    wrong = private_redis.url.replace("://", f"://:{PASSWORD}@")
    for line in (*both(wrong), *both(private_redis.url)):
        assert "rejected the connection" in line
        assert private_redis.url.partition("://")[2] in line


def test_kafka_refuses_a_wrong_password(both: Both) -> None:
    with refusing_kafka() as port:
        lines = both(
            f"kafka://someone:{PASSWORD}@127.0.0.1:{port}/"
            "?security.protocol=SASL_PLAINTEXT&sasl.mechanism=PLAIN"
        )
    for line in lines:
        assert f"broker kafka://127.0.0.1:{port} rejected the connection: " in line
        assert "said the script" in line


def test_the_error_for_missing_aws_credentials_says_how_to_set_them(
    shared_sqs: SqsServer, both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    for line in both(f"sqs://eu-west-1/?endpoint_url={shared_sqs.endpoint_url}"):
        assert "credentials" in line
        assert "sqs://key:secret@region/" in line


def test_an_exchange_and_a_queue_that_the_user_cannot_create_are_named(
    shared_rabbitmq: RabbitMQServer, both: Both, consume: Refuse
) -> None:
    with user_who_may_make(shared_rabbitmq, "^billing") as url:
        for line in both(f"{url}?exchange=missing-exchange"):
            assert "exchange 'missing-exchange'" in line
        line = consume(f"{url}?queue=missing-queue")
    assert "queue 'missing-queue' doesn't exist and can't be created: " in line
    assert "access" in line.lower()


def test_the_error_for_a_missing_library_says_how_to_install_it(
    database_url: str, tmp_path: Path
) -> None:
    (tmp_path / "shop_app.py").write_text(APP)
    for library in LIBRARIES.values():
        missing = f"raise ModuleNotFoundError({library!r}, name={library!r})\n"
        (tmp_path / f"{library}.py").write_text(missing)
    ours = {
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "PILLARBOX_DATABASE_URL": database_url,
        "TEST_URL": database_url,
    }
    tried = subprocess.run(
        [sys.executable, "-c", TRY_ALL, *LIBRARIES],
        check=False,
        env=os.environ | ours,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert tried.returncode == 0, tried.stdout
    assert PASSWORD not in tried.stdout
    *twice, once = LIBRARIES.items()
    expected = [each for each in twice for _ in ("relay", "inbox")] + [once]
    lines = tried.stdout.splitlines()
    for line, (extra, library) in zip(lines, expected, strict=True):
        assert line.startswith("pillarbox: ")
        assert f"run pip install 'pillarbox[{extra}]'" in line
        assert library in line


def test_the_error_for_an_unknown_scheme_lists_the_known_ones(both: Both) -> None:
    for line in both(f"pigeon://someone:{PASSWORD}@coop"):
        assert "'pigeon'" in line
        assert "installed: amqp, amqps, " in line
        assert "pip install 'pillarbox[…]' with one of " in line
        for extra in LIBRARIES.keys() - {"http"}:
            assert extra in line.rpartition(" of ")[2]
