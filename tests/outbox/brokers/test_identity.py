"""The identity of a broker: what in its URL decides where messages go."""

import pytest

from pillarbox.outbox.brokers.options import identity_of
from pillarbox.outbox.brokers.plugins import implementation
from pillarbox.outbox.errors import ConfigError

SAME = [
    ("redis://ann:old@b:6379,A/0?maxlen=5", "rediss://:new@a,B:6379"),
    ("redis://h/?db=2&socket_timeout=5", "redis://h/2"),
    ("redis://h", "redis://h?shards=1"),
    ("kafka://b1:9092,b2?linger.ms=3", "kafka://u:p@B2,b1?acks=all"),
    ("amqp://u:p@h/%2F?timeout=9s", "amqps://h:5671"),
    ("nats://token@h1:4222,h2?stream=S", "tls://h2,H1?stream=S&timeout=3s"),
    ("sqs://eu-central-1/?fifo=true", "sqs://k:s@eu-central-1?in_flight=2&fifo=true"),
    ("https://u:p@h/hook?timeout=3s", "http://h/hook?unsigned=true"),
    ("postgresql://u:p@h,g/db", "postgres://g:5432,H/db?sslmode=require&prefetch=9"),
    ("postgresql://h/db", "postgresql+psycopg://h/db"),
    ("redis://[::1]:6379", "redis://[0:0:0:0:0:0:0:1]"),
    ("redis://h.example.com", "redis://h.example.com."),
    ("https://h/hook?b=1&a=2", "https://h/hook?a=2&b=1"),
    (
        "sqs://eu-west-1/?endpoint_url=https://H:443/",
        "sqs://eu-west-1?endpoint_url=https://h",
    ),
    ("acme://u:p@h/x", "acme://H/x"),
]
DIFFERENT = [
    ("redis://h/0", "redis://h/1"),
    ("redis://h:1", "redis://h:2"),
    ("redis://h", "redis://h?shards=2"),
    ("kafka://b1,b2", "kafka://b1,b3"),
    ("amqp://h/a", "amqp://h/b"),
    ("amqp://h", "amqp://h?exchange=other"),
    ("nats://h", "nats://h?shards=2"),
    ("nats://h?stream=S", "nats://h?stream=T"),
    ("nats://h?domain=a", "nats://h"),
    ("sqs://eu-central-1/", "sns://eu-central-1/"),
    ("sqs://eu-central-1/", "sqs://eu-west-1/"),
    ("sqs://eu-central-1/?queue_prefix=a", "sqs://eu-central-1/?queue_prefix=b"),
    ("https://h/a", "https://h/b"),
    ("https://h/a?to=1", "https://h/a?to=2"),
    ("https://h/a", "https://h/a/"),
    ("postgresql://h/a", "postgresql://h/b"),
    ("postgresql:///a?host=/run", "postgresql:///a?host=/tmp"),
    ("postgresql:///a?service=one", "postgresql:///a?service=two"),
    ("postgresql://h/a?hostaddr=192.0.2.1", "postgresql://h/a?hostaddr=192.0.2.2"),
    ("acme://h/x", "acme://h/y"),
    ("acme://h/x?queue=1", "acme://h/x?queue=2"),
]


def test_urls_have_one_identity_exactly_if_they_lead_to_the_same_place() -> None:
    for one, other in SAME:
        assert identity_of(one) == identity_of(other), (one, other)
    for one, other in DIFFERENT:
        assert identity_of(one) != identity_of(other), (one, other)


def test_queues_are_also_identified_by_what_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = {identity_of("sqs:///")}
    for variable, value in (
        ("AWS_DEFAULT_REGION", "eu-west-1"),
        ("AWS_ENDPOINT_URL", "http://localhost:4566"),
        ("AWS_ENDPOINT_URL_SQS", "http://localhost:4567"),
    ):
        monkeypatch.setenv(variable, value)
        assert identity_of("sqs:///") not in seen, variable
        seen.add(identity_of("sqs:///"))


def test_a_publisher_has_the_identity_of_its_url() -> None:
    for url in (
        "redis://u:p@h/1",
        "kafka://u:p@h",
        "amqp://u:p@h/v?exchange=e",
        "nats://u:p@h",
        "sns://k:s@eu-central-1/?topic_prefix=t",
        "https://u:p@h/hook?unsigned=true&to=1",
        "postgresql://u:p@h/db?max_payload_bytes=9",
        "memory://drop",
    ):
        publisher = implementation("pillarbox.publishers", url)(url)
        assert (url, publisher.identity) == (url, identity_of(url))


def test_an_identity_contains_no_credentials() -> None:
    for scheme in ("redis", "kafka", "amqp", "nats", "https", "acme"):
        identity = identity_of(f"{scheme}://ann:hemlighet@h/")
        assert "hemlighet" not in identity, scheme
        assert "ann" not in identity, scheme
    assert "hemlighet" not in identity_of("https://h/hook?token=hemlighet")
    assert "hemlighet" not in identity_of("https://h/services/hemlighet")
    for text in ("host=h password=hemlighet", "host=h password=x://hemlighet"):
        with pytest.raises(ConfigError, match="must be a URL"):
            identity_of(text)
