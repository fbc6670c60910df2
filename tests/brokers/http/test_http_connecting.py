"""The destinations of webhooks, TLS and URLs."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme

from pillarbox import Message
from pillarbox.outbox.brokers.plugins import implementation
from pillarbox.outbox.errors import BrokerUnavailableError, ConfigError
from pillarbox.relay.publisher import Acked
from pillarbox.relay.publishers.http import HttpPublisher
from tests.fixtures.http import SECRET, SECRET_ENV, MakeTarget, Target, answers

ONE = Message("orders", b"1")


@asynccontextmanager
async def entered_without_a_check(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[HttpPublisher]:
    """A publisher that connects only to post, as after a DNS change."""

    async def connect(self: HttpPublisher) -> None:
        pass

    monkeypatch.setattr(HttpPublisher, "_connect", connect)
    async with HttpPublisher.from_url(url) as publisher:
        yield publisher


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "127.1",
        "0",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "10.0.0.1",
        "169.254.169.254",
        "192.168.0.1",
        "[fe80::1]",
        "[fd00::1]",
    ],
)
async def test_a_private_address_is_refused_at_start(target: Target, host: str) -> None:
    url = target.url(host=host).replace("allow_private=true", "allow_private=false")
    with pytest.raises(ConfigError, match=r"not a public address; add allow_private"):
        async with HttpPublisher.from_url(url):
            pass
    assert target.arrivals == []


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "[::ffff:127.0.0.1]", "2130706433", "127.1"]
)
async def test_a_name_that_later_resolves_to_a_private_address_is_refused(
    target: Target, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = target.url(host=host).replace("&allow_private=true", "")
    async with entered_without_a_check(url, monkeypatch) as publisher:
        for _ in range(2):
            with pytest.raises(BrokerUnavailableError):
                await publisher.publish([ONE])
    assert target.arrivals == []


async def test_a_name_with_a_private_address_can_be_allowed(target: Target) -> None:
    async with HttpPublisher.from_url(target.url(host="localhost")) as publisher:
        assert await publisher.publish([ONE]) == [Acked()]
    assert target.arrivals[0].headers["host"] == f"localhost:{target.port}"


async def test_a_redirect_to_a_private_address_is_not_followed(
    make_target: MakeTarget,
) -> None:
    outside, inside = make_target(), make_target()
    outside.script = answers(307, headers={"Location": inside.url()})
    async with HttpPublisher.from_url(outside.url()) as publisher:
        with pytest.raises(BrokerUnavailableError, match="which is not followed"):
            await publisher.publish([ONE])
    assert inside.arrivals == []


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "https://127.0.0.1:1"])
@pytest.mark.usefixtures("target")
async def test_an_unavailable_host_is_reported_at_start(url: str) -> None:
    url = f"{url}/?secret_env={SECRET_ENV}&allow_private=true"
    with pytest.raises(BrokerUnavailableError, match="can't be reached"):
        async with HttpPublisher.from_url(url):
            pass


@pytest.mark.usefixtures("target")
async def test_an_unknown_name_is_reported_at_start() -> None:
    url = f"https://nobody.invalid/?secret_env={SECRET_ENV}"
    with pytest.raises(BrokerUnavailableError, match="can't be reached"):
        async with HttpPublisher.from_url(url):
            pass


class TestTls:
    @pytest.fixture(autouse=True)
    def authority(self, make_target: MakeTarget, tmp_path: Path) -> None:
        authority = trustme.CA()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("localhost").configure_cert(context)
        self.target = make_target(context)
        self.ca_file = tmp_path / "ca.pem"
        authority.cert_pem.write_to_path(self.ca_file)

    async def test_a_certificate_needs_a_known_authority_and_the_right_host(
        self,
    ) -> None:
        good = self.target.url(f"ca_file={self.ca_file}", host="localhost")
        async with HttpPublisher.from_url(good) as publisher:
            assert await publisher.publish([ONE]) == [Acked()]
        assert self.target.messages() == [ONE]
        for url, reason in (
            (self.target.url(host="localhost"), r"isn't trusted.*ca_file"),
            (good.replace("localhost", "127.0.0.1"), r"isn't trusted.*not valid for"),
        ):
            with pytest.raises(ConfigError, match=reason):
                async with HttpPublisher.from_url(url):
                    pass

    async def test_an_untrusted_certificate_is_refused_at_every_connection(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        url = self.target.url(host="localhost")
        async with entered_without_a_check(url, monkeypatch) as publisher:
            with pytest.raises(BrokerUnavailableError, match="CERTIFICATE_VERIFY"):
                await publisher.publish([ONE])
        assert self.target.arrivals == []


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://h/", "no secret to sign with"),
        ("http://h/?secret_env=", "write the name of an environment variable"),
        ("http://h/?secret_env=NOT_THERE", "secret_env: no such environment variable"),
        (f"http://h/?secret={SECRET}", "URLs get printed"),
        (f"http://h/?secret={SECRET}&unsigned=true", "URLs get printed"),
        ("http://h/?unsigned=yes", "write true or false"),
        ("http://h/?unsigned=true&allow_private=1", "write true or false"),
        ("http://h/?unsigned=true&timeout=soon", "write a duration"),
        ("http://h/?unsigned=true&max_connections=0", "whole number"),
        ("https://h/?unsigned=true&ca_file=/not/there", "certificates in PEM"),
        ("http:///path?unsigned=true", "write https://host/path"),
        ("http://h:99999/?unsigned=true", "write https://host/path"),
        ("http://h/#part?unsigned=true", "write https://host/path"),
        ("ftp://h/?unsigned=true", "write https://host/path"),
    ],
)
def test_an_invalid_url_is_refused(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as told:
        HttpPublisher.from_url(url)
    assert SECRET not in str(told.value)


def test_a_secret_in_place_of_the_name_of_its_variable_is_not_shown() -> None:
    with pytest.raises(ConfigError, match="not the secret itself") as refused:
        HttpPublisher.from_url("https://h/?secret_env=whsec_hemlighet")
    assert "hemlighet" not in str(refused.value)


def test_an_invalid_secret_is_refused_without_showing_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SECRET_ENV, "whsec_hunter2!")
    with pytest.raises(ConfigError, match="webhook secret") as told:
        HttpPublisher.from_url(f"http://h/?secret_env={SECRET_ENV}")
    assert "hunter2" not in str(told.value)


async def test_signatures_can_be_turned_off(
    target: Target,
) -> None:
    url = target.url().replace(f"secret_env={SECRET_ENV}", "unsigned=true")
    async with HttpPublisher.from_url(url) as publisher:
        assert await publisher.publish([ONE]) == [Acked()]
    headers = target.arrivals[0].headers
    assert headers["webhook-id"] == str(ONE.id)
    assert "webhook-signature" not in headers


def test_the_http_broker_has_no_source() -> None:
    with pytest.raises(ConfigError, match="no source for the scheme 'http'"):
        implementation("pillarbox.sources", "http://h/")
