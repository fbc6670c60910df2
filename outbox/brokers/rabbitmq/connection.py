"""RabbitMQ from a URL: parameters, names and failures, for publisher and source."""

import logging
import ssl
from collections.abc import Mapping, Sequence
from typing import Final

import pika
from pika.adapters.utils.connection_workflow import (
    AMQPConnectionWorkflowFailed,
    AMQPConnectorException,
    AMQPConnectorPhaseErrorBase,
)
from pika.exceptions import (
    AMQPError,
    ChannelClosed,
    ConnectionClosed,
    ProbableAccessDeniedError,
    ProbableAuthenticationError,
)

from outbox.errors import BrokerUnavailableError, ConfigError, shorten
from outbox.url import split, take_options, without_password

BROKEN: Final = (AMQPError, AMQPConnectorException, OSError)
EXCHANGE: Final = "outbox"
"""Where topics are published to unless the URL names another exchange."""

MAX_NAME_BYTES: Final = 255
"""Of what AMQP calls a short string: names, routing keys, content types."""

_TLS_FILES: Final = ("cacertfile", "certfile", "keyfile")
_HEARTBEAT: Final = 20

# It logs each failure several times and with a stack; ours is one line, raised.
if (_logger := logging.getLogger("pika")).level == logging.NOTSET:
    _logger.setLevel(logging.CRITICAL)


def rabbitmq_parameters(url: str) -> pika.URLParameters:
    """Read a URL as pika does, with `cacertfile`, `certfile` and `keyfile` for TLS.

    Raises:
        ConfigError: it can't be used.
    """
    name = without_password(url)
    rest, files = take_options(url, _TLS_FILES)
    split(rest)
    scheme, _, address = rest.partition("://")
    if scheme not in {"amqp", "amqps", "rabbitmq"} or not address:
        raise ConfigError(f"broker URL {name}: write amqp://user:password@host:port")
    secure = scheme == "amqps"
    if files and not secure:
        raise ConfigError(f"broker URL {name}: {', '.join(files)} takes amqps://")
    try:
        parameters = pika.URLParameters(f"{'amqps' if secure else 'amqp'}://{address}")
        if secure and "ssl_options=" not in address:
            parameters.ssl_options = pika.SSLOptions(_tls(files), parameters.host)
    except (ValueError, TypeError, SyntaxError, OSError) as error:
        raise ConfigError(f"broker URL {name}: {error}") from None
    if parameters.heartbeat is None:
        parameters.heartbeat = _HEARTBEAT
    return parameters


def checked_name(option: str, value: str) -> str:
    """Check the name of an exchange or a queue.

    Raises:
        ConfigError: it is empty or too long.
    """
    if not 0 < len(value.encode()) <= MAX_NAME_BYTES:
        raise ConfigError(
            f"{option} {shorten(value)}: must have 1 to {MAX_NAME_BYTES} bytes"
        )
    return value


def choice(options: Mapping[str, str], name: str, choices: Sequence[str]) -> str:
    """Read an option that is one of a few words, the first if it isn't given.

    Raises:
        ConfigError: it is another.
    """
    value = options.get(name, choices[0])
    if value not in choices:
        raise ConfigError(
            f"broker URL option {name}={shorten(value)}: "
            f"write one of {', '.join(choices)}"
        )
    return value


def rabbitmq_away(url: str, error: BaseException) -> BrokerUnavailableError:
    """Say why RabbitMQ can't be used now."""
    if isinstance(error, BrokerUnavailableError):
        return error
    error = _cause(error)
    text = str(error) or type(error).__name__
    if isinstance(error, ProbableAuthenticationError | ProbableAccessDeniedError):
        said = f"refuses us: {text}"
    elif isinstance(error, ChannelClosed | ConnectionClosed):
        said = f"ended the connection: {error.reply_text}"
    else:
        said = f"can't be reached: {text}"
    return BrokerUnavailableError(f"broker {without_password(url)} {said}")


def _cause(error: BaseException) -> BaseException:
    """Take off what pika wraps around the failure of an attempt to connect."""
    while True:
        inner: object = error.args[0] if error.args else None
        if isinstance(error, AMQPConnectionWorkflowFailed):
            inner = error.exceptions[-1]
        elif isinstance(error, AMQPConnectorPhaseErrorBase):
            inner = error.exception
        if not isinstance(inner, BaseException):
            return error
        error = inner


def _tls(files: dict[str, str]) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=files.get("cacertfile"))
    if "certfile" in files:
        context.load_cert_chain(files["certfile"], files.get("keyfile"))
    return context
