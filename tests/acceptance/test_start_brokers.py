"""Given an unusable broker, both commands print the reason and exit with status 2."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from redis import Redis

from outbox.testing.lifetime import free_port
from outbox.testing.postgres import PostgresServer, postgres_server
from tests.fixtures.http import SECRET, SECRET_ENV
from tests.fixtures.kafka_script import refusing_kafka
from tests.fixtures.postgres import FEW_DAYS, Template, new_database
from tests.fixtures.processes import ROOT
from tests.fixtures.refusals import (
    PASSWORD,
    Refused,
    run_to_refusal,
    user_who_may_make,
)
from tests.fixtures.sqs_script import error, scripted_sqs
from tests.servers.nats import NatsServer, nats_server
from tests.servers.rabbitmq import RabbitMQServer
from tests.servers.redis import RedisServer
from tests.servers.sqs import SqsServer

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
    broker: str, refused: Refused
) -> None:
    assert " URL " in refused(broker)


@pytest.mark.parametrize("scheme", AWAY)
def test_an_unavailable_broker_is_named(scheme: str, refused: Refused) -> None:
    port = free_port()
    line = refused(AWAY[scheme].format(password=PASSWORD, port=port))
    assert "can't be reached" in line or "can't reach" in line
    assert f"127.0.0.1:{port}" in line


def test_an_unavailable_receiver_is_named(database_url: str, tmp_path: Path) -> None:
    port = free_port()
    broker = (
        f"http://someone:{PASSWORD}@127.0.0.1:{port}/hook"
        f"?secret_env={SECRET_ENV}&allow_private=true"
    )
    arguments = ["relay", f"--database={database_url}", f"--broker={broker}"]
    line = run_to_refusal(arguments, tmp_path, {SECRET_ENV: SECRET})
    assert f"127.0.0.1:{port}/hook can't be reached" in line


def test_redis_refuses_a_wrong_password(
    private_redis: RedisServer, refused: Refused
) -> None:
    with Redis.from_url(private_redis.url) as client:
        client.config_set("requirepass", "another")
    line = refused(private_redis.url.replace("://", f"://:{PASSWORD}@"))
    assert "rejected the connection" in line
    assert private_redis.url.partition("://")[2] in line


def test_redis_refuses_a_missing_password(
    private_redis: RedisServer, refused: Refused
) -> None:
    with Redis.from_url(private_redis.url) as client:
        client.config_set("requirepass", PASSWORD)
    assert "rejected the connection" in refused(private_redis.url)


def test_rabbitmq_refuses_a_wrong_password(
    shared_rabbitmq: RabbitMQServer, refused: Refused
) -> None:
    line = refused(shared_rabbitmq.url.replace("guest:guest", f"guest:{PASSWORD}"))
    assert "rejected the connection" in line


@pytest.fixture(scope="module")
def guarded_nats() -> Iterator[NatsServer]:
    """A server that asks for a password."""
    only = {"authorization": {"user": "someone", "password": "another"}}
    with nats_server(only) as server:
        yield server


@pytest.mark.parametrize("user", ["", f"someone:{PASSWORD}@", f"{PASSWORD}@"])
def test_nats_refuses_a_wrong_user_and_a_wrong_token(
    user: str, guarded_nats: NatsServer, refused: Refused
) -> None:
    line = refused(guarded_nats.url.replace("://", f"://{user}"))
    assert "rejected the connection" in line


@pytest.fixture(scope="module")
def guarded_postgres() -> Iterator[PostgresServer]:
    """A server that asks one role for a password."""
    with postgres_server(durable=False) as server:
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute("CREATE ROLE someone LOGIN PASSWORD 'another'")
            found = connection.execute("SHOW hba_file").fetchone()
            assert found is not None
            rules = Path(found[0])
            ours = "host all someone 127.0.0.1/32 scram-sha-256\n"
            rules.write_text(ours + rules.read_text())
            connection.execute("SELECT pg_reload_conf()")
        yield server


def test_postgres_refuses_a_wrong_password(
    guarded_postgres: PostgresServer, refused: Refused
) -> None:
    address = guarded_postgres.url.partition("@")[2]
    line = refused(f"postgresql://someone:{PASSWORD}@{address}")
    assert "password authentication failed" in line
    assert f"postgresql://someone@{address}" in line


def test_kafka_refuses_a_wrong_password(refused: Refused) -> None:
    with refusing_kafka() as port:
        line = refused(
            f"kafka://someone:{PASSWORD}@127.0.0.1:{port}/"
            "?security.protocol=SASL_PLAINTEXT&sasl.mechanism=PLAIN"
        )
    assert f"broker kafka://127.0.0.1:{port} rejected the connection: " in line
    assert "said the script" in line


@pytest.mark.parametrize("code", ["InvalidClientTokenId", "SignatureDoesNotMatch"])
async def test_aws_refuses_a_wrong_secret(code: str, refused: Refused) -> None:
    async with scripted_sqs() as sqs:
        sqs.other = error(code, 403)
        url = sqs.url().replace("key:secret", f"key:{PASSWORD}")
        line = await asyncio.to_thread(refused, url)
    assert code in line
    assert "give them in the URL, sqs://key:secret@region/" in line


def test_a_read_only_postgres_is_named(database_url: str, refused: Refused) -> None:
    line = refused(f"{database_url}?options=-cdefault_transaction_read_only%3Don")
    assert "in a read-only transaction" in line
    assert database_url.partition("@")[2] in line


def test_the_error_for_missing_aws_credentials_says_how_to_set_them(
    shared_sqs: SqsServer, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    line = refused(f"sqs://eu-west-1/?endpoint_url={shared_sqs.endpoint_url}")
    assert "credentials" in line
    assert "sqs://key:secret@region/" in line


def test_a_missing_stream_is_named(shared_nats: NatsServer, refused: Refused) -> None:
    line = refused(f"{shared_nats.url}?stream=MISSING")
    assert "stream 'MISSING'" in line
    assert "create the stream" in line


def test_a_missing_exchange_that_the_user_cannot_create_is_named(
    shared_rabbitmq: RabbitMQServer, refused: Refused
) -> None:
    with user_who_may_make(shared_rabbitmq, "^billing") as url:
        assert "missing-exchange" in refused(f"{url}?exchange=missing-exchange")


def hide(module: str, modules: Path) -> None:
    """Make a library appear missing to processes that import from `modules` first."""
    missing = f"raise ModuleNotFoundError({module!r}, name={module!r})\n"
    (modules / f"{module}.py").write_text(missing)


def test_the_error_for_a_missing_library_says_how_to_install_it(
    database_url: str, modules: Path
) -> None:
    for library in LIBRARIES.values():
        hide(library, modules)
    ours = {
        "PYTHONPATH": f"{modules}:{ROOT}",
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
    database_url: str, modules: Path
) -> None:
    hide("aiohttp", modules)
    line = run_to_refusal(
        ["relay", f"--database={database_url}", "--broker=https://127.0.0.1/hook"],
        modules.parent,
        {"PYTHONPATH": f"{modules}:{ROOT}"},
    )
    assert "run pip install 'pillarbox[http]'" in line


def test_the_error_for_an_unknown_scheme_lists_the_known_ones(refused: Refused) -> None:
    line = refused(f"pigeon://someone:{PASSWORD}@coop")
    assert "'pigeon'" in line
    assert "installed: amqp, amqps, " in line
    assert "pip install 'pillarbox[…]' with one of " in line
    for extra in LIBRARIES:
        assert extra in line.rpartition(" of ")[2]
