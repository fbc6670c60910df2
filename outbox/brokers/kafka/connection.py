"""Kafka's URL and librdkafka's errors, for the publisher and the source."""

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import SplitResult, unquote

from confluent_kafka import KafkaError, KafkaException

from pillarbox.outbox.brokers.kafka.options import KafkaOptions
from pillarbox.outbox.errors import BrokerUnavailableError, ConfigError
from pillarbox.outbox.url import split

PREFIX: Final = "ce_"
"""The prefix of CloudEvents attributes in the headers of a Kafka record."""

_URL: Final = "write kafka://host:port[,host:port…]/?option=value"
_UNKNOWN: Final = re.compile(r'No such configuration property: "([^"]*)"')
_SETTINGS: Final[dict[str, Any]] = {
    "client.id": "pillarbox",
    "allow.auto.create.topics": True,
    "log.connection.close": False,
    "log_level": 4,
    "reconnect.backoff.max.ms": 1000,
    "socket.connection.setup.timeout.ms": 5000,
    "socket.keepalive.enable": True,
    "topic.metadata.refresh.fast.interval.ms": 100,
}
_logger = logging.getLogger(__name__)
# Failures that matter are raised or nacked, once and not at every attempt.
_logger.addFilter(
    lambda record: not record.getMessage().startswith(("FATAL", "FAIL", "CONFWARN"))
)


def kafka_config(url: str, ours: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a URL's printable name, and the client configuration that it specifies.

    The options of the URL are librdkafka's own properties. A user in the URL means
    SASL_SSL with SCRAM-SHA-512, unless its options say otherwise.

    Args:
        ours: settings that the options can't change.

    Raises:
        ConfigError: the URL isn't a valid Kafka URL, or sets an option that can't be
            changed.
    """
    parts = split(url)
    servers = parts.netloc.rpartition("@")[2]
    name = f"kafka://{servers}"
    if (
        parts.scheme != "kafka"
        or not servers
        or parts.path not in {"", "/"}
        or parts.fragment
    ):
        raise ConfigError(f"broker URL {name}{parts.path}: {_URL}")
    options = _options(parts.query, name)
    for option in options:
        if option in ours or option in {"bootstrap.servers", "metadata.broker.list"}:
            raise ConfigError(f"broker URL option {option}: can't be changed")
    return name, {
        **_SETTINGS,
        **_credentials(parts),
        **options,
        **ours,
        "bootstrap.servers": servers,
        "logger": _logger,
    }


def check_config(
    name: str, make: Callable[[dict[str, Any]], object], config: Any
) -> None:
    """Check a configuration with librdkafka, without connecting.

    Raises:
        ConfigError: librdkafka rejects it.
    """
    try:
        make(config | {"bootstrap.servers": "", "log_level": 0})
    except (KafkaException, ValueError, TypeError) as error:
        reason = reason_of(error)
        if unknown := _UNKNOWN.search(reason):
            raise KafkaOptions.unknown(name, unknown[1]) from None
        raise ConfigError(f"broker URL {name}: {reason}") from None


def reason_of(error: BaseException | KafkaError) -> str:
    """Return the text of a librdkafka error as one line."""
    if isinstance(error, KafkaException) and isinstance(error.args[0], KafkaError):
        error = error.args[0]
    text = error.str() if isinstance(error, KafkaError) else str(error)
    return " ".join(text.split())


def kafka_unavailable(name: str, reason: str) -> BrokerUnavailableError:
    """Return an error that says why Kafka is unavailable."""
    return BrokerUnavailableError(f"broker {name} can't be reached: {reason}")


def _credentials(parts: SplitResult) -> dict[str, str]:
    user, at, _ = parts.netloc.rpartition("@")
    if not at:
        return {}
    name, _, password = user.partition(":")
    return {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": unquote(name),
        "sasl.password": unquote(password),
    }


def _options(query: str, name: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in filter(None, query.split("&")):
        option, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"broker URL {name}: option {option} has no value")
        options[unquote(option)] = unquote(value)
    return options
