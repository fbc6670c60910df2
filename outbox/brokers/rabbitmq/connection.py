"""RabbitMQ's connection parameters and errors, for the publisher and the source."""

import logging
import re
import ssl
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

from pillarbox.outbox.brokers.rabbitmq.options import RabbitMQOptions
from pillarbox.outbox.errors import (
    BrokerRefusedError,
    BrokerUnavailableError,
    ConfigError,
)
from pillarbox.outbox.url import split, without_password

BROKEN: Final = (AMQPError, AMQPConnectorException, OSError)
_TLS_FILES: Final = ("cacertfile", "certfile", "keyfile")
_HEARTBEAT: Final = 20
# ACCESS_REFUSED, NOT_ALLOWED
_REFUSED: Final = re.compile(r"\((403|530)\)")

# pika logs each failure several times, with a stack trace; pillarbox raises one line.
if (_logger := logging.getLogger("pika")).level == logging.NOTSET:
    _logger.setLevel(logging.CRITICAL)


def rabbitmq_parameters(url: str, options: RabbitMQOptions) -> pika.URLParameters:
    """Return pika's parameters for a URL without pillarbox's options, and TLS files.

    Raises:
        ConfigError: the URL or a file is invalid.
    """
    name = without_password(url)
    parts = split(url)
    scheme, _, address = url.partition("://")
    if scheme not in RabbitMQOptions.schemes or not parts.hostname:
        raise ConfigError(f"broker URL {name}: write amqp://user:password@host:port")
    secure = scheme == "amqps"
    files = {n: v for n in _TLS_FILES if (v := getattr(options, n)) is not None}
    if files and not secure:
        raise ConfigError(f"broker URL {name}: {', '.join(files)} needs amqps://")
    try:
        parameters = pika.URLParameters(f"{'amqps' if secure else 'amqp'}://{address}")
        if secure and "ssl_options=" not in address:
            parameters.ssl_options = pika.SSLOptions(_tls(files), parameters.host)
    except (ValueError, TypeError, SyntaxError, OSError) as error:
        raise ConfigError(f"broker URL {name}: {error}") from None
    if parameters.heartbeat is None:
        parameters.heartbeat = _HEARTBEAT
    return parameters


def rabbitmq_unavailable(url: str, error: BaseException) -> BrokerUnavailableError:
    """Return an error that says why RabbitMQ is unavailable."""
    if isinstance(error, BrokerUnavailableError):
        return error
    error = _cause(error)
    text = str(error) or type(error).__name__
    kind = BrokerUnavailableError
    if isinstance(error, ProbableAuthenticationError | ProbableAccessDeniedError):
        problem = f"rejected the connection: {text}"
        if _REFUSED.search(text):  # else the connection was lost in the handshake
            kind = BrokerRefusedError
    elif isinstance(error, ChannelClosed | ConnectionClosed):
        problem = f"ended the connection: {error.reply_text}"
    else:
        problem = f"can't be reached: {text}"
    return kind(f"broker {without_password(url)} {problem}")


def _cause(error: BaseException) -> BaseException:
    """Return the cause of a failed connection attempt, which pika wraps."""
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
