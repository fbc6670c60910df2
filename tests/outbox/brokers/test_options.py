"""Options of broker URLs: one declaration serves both sides, the docs and the help."""

import inspect
from dataclasses import fields
from datetime import timedelta
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pika import URLParameters
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection

from pillarbox.outbox.brokers.nats.options import NAME_FORM
from pillarbox.outbox.brokers.options import BrokerOptions, Form, brokers, options_of
from pillarbox.outbox.brokers.plugins import implementation
from pillarbox.outbox.brokers.rabbitmq.options import RabbitMQOptions
from pillarbox.outbox.brokers.redis.options import RedisOptions
from pillarbox.outbox.errors import ConfigError, UnknownImplementationError

DOCS = Path(__file__).parents[3] / "docs" / "brokers"
BROKERS = brokers()
# Each URL serves both sides, and contains options of each.
ONE_URL = {
    "amqp": "amqp://h/?unroutable=drop&timeout=3s&prefetch=10&heartbeat=5",
    "kafka": "kafka://h/?timeout=3s&max_payload_bytes=9&session.timeout.ms=6000"
    "&auto.offset.reset=latest&linger.ms=0&handover=3s",
    "memory": "memory://",
    "nats": "nats://h?max_payload_bytes=9&ack_wait=5s&stream=S&create=a.>",
    "postgresql": "postgresql://h/x?max_payload_bytes=9&lease=20s&sslmode=require",
    "redis": "redis://h/0?maxlen=9&reclaim_after=5s&health_check_interval=3",
    "sqs": "sqs://eu-west-1/?in_flight=3&visibility=5s&fifo=true",
}


def declared_forms(options: type[BrokerOptions]) -> dict[str, Form]:
    return {f.name: f.metadata["option"].form for f in fields(options)}


def values(form: Form) -> st.SearchStrategy[Any]:
    """Return values that a form allows, as its description promises."""
    text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=50)
    seconds = st.sampled_from([0.25, *range(1, 21)])
    found: st.SearchStrategy[Any] = text
    match form.description.split():
        case ["a", "whole", "number", "from", least, *rest]:
            found = st.integers(int(least), int(rest[1]) if rest else 10**15)
        case ["a", "duration", *_] | ["whole", "seconds", *_]:
            found = seconds.map(lambda number: timedelta(seconds=number))
        case ["true", "or", "false"]:
            found = st.booleans()
        case ["one", "of", *words]:
            found = st.sampled_from([word.rstrip(",") for word in words])
        case [*_, "separated", "by", "commas"]:
            found = st.lists(text.filter(lambda t: "," not in t), min_size=1).map(tuple)
        case _ if form.description == NAME_FORM:
            found = st.from_regex(r"[A-Za-z0-9_-]{1,20}", fullmatch=True)
        case _ if "12 digits" in form.description:
            found = st.from_regex(r"[0-9]{12}", fullmatch=True)
        case _ if "https" in form.description:
            found = st.sampled_from(["https://host:1", "http://[::1]:80"])
    return found.filter(form.allows)


@pytest.mark.parametrize("broker", BROKERS)
@settings(max_examples=20)
@given(data=st.data())
def test_printed_options_are_parsed_again(broker: str, data: st.DataObject) -> None:
    kind = BROKERS[broker]
    given_values = {
        name: data.draw(values(form), name)
        for name, form in declared_forms(kind).items()
        if data.draw(st.booleans(), f"{name} given")
    }
    if "create" in given_values:
        given_values["stream"] = "S"
    options = kind(**given_values)
    url = f"{kind.schemes[0]}://host/path"
    query = options.query()
    assert kind.parse(f"{url}?{query}" if query else url) == (url, options)


@pytest.mark.parametrize("broker", BROKERS)
@settings(max_examples=30)
@given(text=st.text(max_size=20))
def test_an_invalid_value_is_refused_by_name(broker: str, text: str) -> None:
    kind = BROKERS[broker]
    for name in declared_forms(kind):
        try:
            kind.parse(f"x://host/?{name}={quote(text, errors='replace')}")
        except ConfigError as error:
            assert name in str(error)  # noqa: PT017


SIDES: list[tuple[str, dict[str, Any]]] = [
    ("pillarbox.publishers", {}),
    ("pillarbox.sources", {"consumer": "c", "topics": ["t"]}),
]


@pytest.mark.parametrize("scheme", ONE_URL)
async def test_one_url_serves_both_sides_and_an_unknown_option_is_refused(
    scheme: str,
) -> None:
    url = ONE_URL[scheme]
    unknown = url + f"{'&' if '?' in url else '?'}nonsense=1"
    kind = options_of(scheme)
    for group, side in SIDES:
        found = implementation(group, url)
        for other in kind.schemes:
            assert implementation(group, f"{other}://h") == found, other
        found(url, **side)
        with pytest.raises(ConfigError, match="unknown option 'nonsense'") as refusal:
            found(unknown, **side)
        for name in (*declared_forms(kind), *kind.client):
            assert name in str(refusal.value), "the known options are listed"


REFUSED = {
    "redis://h?maxlen=many": "option maxlen='many': write a whole number from 1",
    "redis://h?reclaim_after=5": "reclaim_after='5': write a duration above 0",
    "redis://h?maxlen=1&maxlen=2": "option maxlen: given twice",
    "redis://h?maxlen=": "option maxlen='': write",
    "redis://h?ssl_ca_certs=/x": "ssl_ca_certs needs rediss://",
    "amqp://h?unroutable=lose": "unroutable='lose': write one of keep, drop",
    "amqp://h?prefetch=65536": "a whole number from 1 to 65535",
    "sqs://r/?wait=21s": "wait='21s': write whole seconds from 0s to 20s",
    "sqs://r/?account=12": "account='12': write its 12 digits",
    "nats://h?create=a": "option create: needs stream=NAME",
    "nats://h?stream=a.b": "stream='a.b': write a name of letters",
    "memory://?a=1": "unknown option 'a'; it has no options",
    "redis+sentinel://h/x?ssl_keyfile=/x": "needs rediss+sentinel://",
    "redis:///0": "write redis://host:port/0",
    "redis://h/nine": "'nine' is not the number of a Redis database",
    "kafka://h/topic": "write kafka://host:port",
    "kafka://:9092": "invalid address",
    "kafka://a:1,b:99999": "invalid address",
    "kafka://h/?acks": "option acks has no value",
    "kafka://h/?compression.codec=best": "compression.codec",
    "kafka://h/?enable.idempotence=false": "enable.idempotence: can't be changed",
    "kafka://h/?bootstrap.servers=x": "bootstrap.servers: can't be changed",
    "nats://h/path": "unexpected '/path'",
    "nats://a,,b": "invalid address",
    "nats://h?tls_ca=/x": "tls_ca needs tls://",
    "tls://h?tls_ca=/no/such/file": "tls_ca: [Errno 2]",
    "nats://h?ack_wait=0s": "option ack_wait='0s': write a duration above 0",
    "amqp:///vhost": "write amqp://user:password@host:port",
    f"amqp://h?exchange={'x' * 256}": "write a name of at most 255 bytes",
    "amqp://h?cacertfile=x": "cacertfile needs amqps://",
    "amqps://h?cacertfile=/nowhere": "[Errno 2]",
    "sqs://eu-west-1/queue": "unexpected 'queue'",
    "sqs://key@eu-west-1/": "give both, sqs://key:secret@region/, or neither",
    "sqs://r/?endpoint_url=localhost": "write https://host:port",
}


def test_a_refusal_names_option_value_and_form() -> None:
    for url, refusal in REFUSED.items():
        with pytest.raises(ConfigError) as told:
            implementation("pillarbox.publishers", url)(url)
        assert refusal in str(told.value), url


def test_every_scheme_has_options_and_the_page_of_its_broker_links_to_them() -> None:
    groups = ("pillarbox.publishers", "pillarbox.sources")
    schemes = {entry.name for group in groups for entry in entry_points(group=group)}
    assert schemes == {s for kind in BROKERS.values() for s in kind.schemes}
    for scheme in schemes:
        assert scheme in options_of(scheme).schemes
    for broker, kind in BROKERS.items():
        page = (DOCS / f"{broker}.md").read_text()
        link = f"reference/brokers.md#{broker})"
        assert not fields(kind) or link in page, broker


def test_options_are_found_by_the_name_of_a_broker() -> None:
    assert options_of("rabbitmq") is options_of("amqps") is RabbitMQOptions
    with pytest.raises(UnknownImplementationError, match="no broker 'mqtt'; installed"):
        options_of("mqtt")


def test_the_client_libraries_accept_the_options_listed_for_them() -> None:
    of_redis = {
        name
        for kind in (AbstractConnection, Connection, SSLConnection)
        for name in inspect.signature(kind).parameters
    }
    of_sentinels = {f"sentinel_{name}" for name in ("username", "password")}
    assert set(RedisOptions.client_names()) <= of_redis | of_sentinels
    setters = {name.removeprefix("_set_url_") for name in dir(URLParameters)}
    assert set(RabbitMQOptions.client_names()) <= setters
