"""Given an unusable broker, both commands print the reason and exit with status 2."""

import asyncio
from pathlib import Path

import psycopg
import pytest
from redis import Redis

from outbox.testing.lifetime import free_port
from outbox.testing.postgres import PostgresServer
from tests.fixtures.http import SECRET, SECRET_ENV
from tests.fixtures.kafka_script import refusing_kafka
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


@pytest.mark.parametrize("user", ["", f"someone:{PASSWORD}@", f"{PASSWORD}@"])
def test_nats_refuses_a_wrong_user_and_a_wrong_token(
    user: str, refused: Refused
) -> None:
    with nats_server(
        {"authorization": {"user": "someone", "password": "another"}}
    ) as server:
        assert "rejected the connection" in refused(
            server.url.replace("://", f"://{user}")
        )


def test_postgres_refuses_a_wrong_password(
    private_server: PostgresServer, refused: Refused
) -> None:
    with psycopg.connect(private_server.url, autocommit=True) as connection:
        connection.execute("CREATE ROLE someone LOGIN PASSWORD 'another'")
        found = connection.execute("SHOW hba_file").fetchone()
        assert found is not None
        rules = Path(found[0])
        ours = "host all someone 127.0.0.1/32 scram-sha-256\n"
        rules.write_text(ours + rules.read_text())
        connection.execute("SELECT pg_reload_conf()")
    address = private_server.url.partition("@")[2]
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


@pytest.mark.parametrize("extra", LIBRARIES)
def test_the_error_for_a_missing_library_says_how_to_install_it(
    extra: str, modules: Path, refused: Refused
) -> None:
    hide(LIBRARIES[extra], modules)
    scheme = {"rabbitmq": "amqp"}.get(extra, extra)
    line = refused(f"{scheme}://someone:{PASSWORD}@127.0.0.1")
    assert f"run pip install 'pillarbox[{extra}]'" in line
    assert LIBRARIES[extra] in line


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


@pytest.mark.parametrize("broker", [f"pigeon://someone:{PASSWORD}@coop", "nonsense"])
def test_the_error_for_an_unknown_scheme_lists_the_known_ones(
    broker: str, refused: Refused
) -> None:
    line = refused(broker)
    assert repr(broker.partition(":")[0]) in line
    assert "installed: amqp, amqps, " in line
    assert "pip install 'pillarbox[…]' with one of " in line
    for extra in LIBRARIES:
        assert extra in line.rpartition(" of ")[2]
