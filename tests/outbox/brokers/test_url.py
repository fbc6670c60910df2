"""The error for an invalid URL is clear and contains no password."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from outbox.brokers.plugins import implementation
from outbox.errors import ConfigError, OutboxError
from outbox.postgres.connection import conninfo, sqlalchemy_url
from outbox.url import scheme_of, split, without_password

_PASSWORD = "hemlighet"
_ADDRESSES = [
    "[::1",
    "::1]",
    "[zz]",
    "[::1]zz",
    "[::1]:port",
    "host:port",
    "host:-1",
    "host:65536",
    "host:99999999999999999999",
    "ho\u2100st",
    "host\udcff",
    "host\x00",
    "ho\nst",
    "ho%zzst",
    ":",
    ",",
    "",
]
_TAILS = [
    *_ADDRESSES,
    *(f"someone:hemlighet@{address}" for address in _ADDRESSES),
    "someone:hemlighet/@host",
    "someone:hemlighet#@host",
    "someone:hemlighet?@host",
    "someone:x?hemlighet=1@host",
    "someone:hemlighet@@host",
    "someone:hemlighet%zz@host",
    "someone:hemlighet%00@host",
    "someone:hemlighet\udcff@host",
    "someone:hemlighet[@host",
    "host/?%",
    "host/?=&==",
    "host/\udcff?option=\udcff",
    "host/?endpoint_url=https://[::1",
    "host/?endpoint_url=https://host:port",
]
_PUBLISHERS = [
    "amqp",
    "amqps",
    "http",
    "https",
    "kafka",
    "memory",
    "nats",
    "postgres",
    "postgresql",
    "rabbitmq",
    "redis",
    "rediss",
    "sns",
    "sqs",
    "tls",
]
_SOURCES = [name for name in _PUBLISHERS if not name.startswith("http")]


def refusals(scheme: str, read: Callable[[str], object]) -> Iterator[str]:
    """Read URLs with all the suffixes, and return the errors of those refused."""
    for tail in _TAILS:
        try:
            read(f"{scheme}://{tail}")
        except OutboxError as error:
            yield str(error)


@pytest.mark.parametrize("scheme", _PUBLISHERS)
async def test_the_error_of_a_publisher_hides_its_password(
    scheme: str,
) -> None:
    found = implementation("relay.publishers", f"{scheme}:")
    said = list(refusals(scheme, found))
    assert said
    assert not [text for text in said if _PASSWORD in text]


@pytest.mark.parametrize("scheme", _SOURCES)
async def test_the_error_of_a_source_hides_its_password(scheme: str) -> None:
    found = implementation("inbox.sources", f"{scheme}:")
    make = partial(found, consumer="billing", topics=["orders"])
    said = list(refusals(scheme, make))
    assert said
    assert not [text for text in said if _PASSWORD in text]


@pytest.mark.parametrize("read", [conninfo, sqlalchemy_url])
def test_the_error_of_a_database_hides_its_password(
    read: Callable[[str], str],
) -> None:
    said = list(refusals("postgresql", read))
    assert said
    assert not [text for text in said if _PASSWORD in text]


@pytest.mark.parametrize("address", ["[::1", "host:port", "ho\u2100st", "host\udcff"])
def test_the_error_for_an_invalid_address_quotes_it_without_the_password(
    address: str,
) -> None:
    with pytest.raises(ConfigError, match="invalid address") as refusal:
        split(f"redis://someone:hemlighet@{address}/0")
    assert f"redis://someone@{address}" in str(refusal.value)


@pytest.mark.parametrize(
    ("url", "printed"),
    [
        ("nats://host:4222", "nats://host:4222"),
        ("nats://one:1,two:2?stream=S", "nats://one:1,two:2"),
        ("nats://hemlighet@host:4222", "nats://@host:4222"),
        ("postgresql://someone@host/db", "postgresql://someone@host/db"),
        ("redis://:hemlighet@host/0", "redis://@host/0"),
        ("amqp://someone:hem:lig@het@host/%2f", "amqp://someone@host/%2f"),
        ("postgresql://someone:hem/lig#het@host/db", "postgresql://someone@host/db"),
        ("postgresql://someone:hem?lighet@host/db", "postgresql://someone"),
        ("postgresql:///shop?password=hemlighet", "postgresql:///shop"),
        ("someone:hemlighet@host", "someone@host"),
        ("https://[::1", "https://[::1"),
        ("nonsense", "nonsense"),
        ("", ""),
    ],
)
def test_the_output_contains_no_password(url: str, printed: str) -> None:
    assert without_password(url) == printed


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "asyncpg"])
@pytest.mark.parametrize("group", ["relay.publishers", "inbox.sources"])
def test_a_url_for_sqlalchemy_names_the_broker_postgresql(
    group: str, driver: str
) -> None:
    found = implementation(group, f"postgresql+{driver}://host/db")
    assert found == implementation(group, "postgresql://host/db")


def test_the_scheme_of_another_broker_may_have_a_plus() -> None:
    assert scheme_of("acme+tls://host") == "acme+tls"
