"""The error for an invalid URL is clear and contains no password."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import entry_points

import pytest

from pillarbox.outbox.brokers.plugins import implementation
from pillarbox.outbox.errors import ConfigError, OutboxError
from pillarbox.outbox.postgres.connection import conninfo, sqlalchemy_url
from pillarbox.outbox.url import scheme_of, split, without_password

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
    "host/?endpoint_url=https://me:hemlighet@host",
    "me:a?maxlen=hemlighet@host",
    "me:a?max_payload_bytes=hemlighet@host/",
    "me:hemlighet@host/?max_payload_bytes=1&max_payload_bytes=1",
    "host/?endpoint_url=https://host:port",
]
_SIDES: dict[str, dict[str, object]] = {
    "pillarbox.publishers": {},
    "pillarbox.sources": {"consumer": "billing", "topics": ["orders"]},
}


def refusals(scheme: str, read: Callable[[str], object]) -> Iterator[str]:
    """Read URLs with all the suffixes, and return the errors of those refused."""
    for tail in _TAILS:
        try:
            read(f"{scheme}://{tail}")
        except OutboxError as error:
            yield str(error)


@pytest.mark.parametrize("group", _SIDES)
async def test_the_error_of_an_adapter_hides_its_password(group: str) -> None:
    for entry in entry_points(group=group):
        found = implementation(group, f"{entry.name}:")
        said = list(refusals(entry.name, partial(found, **_SIDES[group])))
        assert said, entry.name
        assert not [text for text in said if _PASSWORD in text], entry.name


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
        ("someone:hemlighet@host", "…"),
        ("host=db user=me password=hemlighet", "…"),
        ("host=db password=x://hemlighet", "…"),
        (" postgresql://me:hemlighet@host", "…"),
        ("https://hooks.example/services/hemlighet", "https://hooks.example/…"),
        ("https://me:hemlighet@hooks.example/hemlighet", "https://me@hooks.example/…"),
        ("https://hooks.example/@me:hemlighet/x", "https://…"),
        ("https://hooks.example/", "https://hooks.example/"),
        ("https://[::1", "https://[::1"),
        ("hemlighet", "…"),
        ("", ""),
    ],
)
def test_the_output_contains_no_password(url: str, printed: str) -> None:
    assert without_password(url) == printed


def test_a_url_for_sqlalchemy_names_the_broker_postgresql() -> None:
    for group in _SIDES:
        expected = implementation(group, "postgresql://host/db")
        for driver in ("psycopg", "psycopg2", "asyncpg"):
            found = implementation(group, f"postgresql+{driver}://host/db")
            assert (group, driver, found) == (group, driver, expected)
    assert scheme_of("acme+tls://host") == "acme+tls"
