"""The settings of a broker URL for a connection to NATS with JetStream."""

import ssl
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import unquote

from pillarbox.outbox.brokers.nats.options import NatsOptions
from pillarbox.outbox.errors import (
    BrokerRefusedError,
    BrokerUnavailableError,
    ConfigError,
    shorten,
)
from pillarbox.outbox.url import split, without_password


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsSettings:
    """The settings of a broker URL for the connection and the stream.

    Attributes:
        name: the URL in a form that is safe to print.
        api: the subject prefix of JetStream's API.
    """

    name: str
    servers: list[str]
    secure: bool
    user: str | None = field(repr=False)  # the token if there is no password
    password: str | None = field(repr=False)
    tls: ssl.SSLContext | None
    api: str
    options: NatsOptions

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Read a URL.

        Raises:
            ConfigError: the URL is invalid.
        """
        name = without_password(url)
        rest, options = NatsOptions.parse(url)
        parts = split(rest)
        credentials, _, hosts = parts.netloc.rpartition("@")
        if parts.scheme not in NatsOptions.schemes or not all(hosts.split(",")):
            raise ConfigError(f"broker URL {name}: write nats://host:4222")
        if parts.path not in {"", "/"} or parts.fragment:
            unknown = parts.path if parts.path not in {"", "/"} else parts.fragment
            raise ConfigError(
                f"broker URL {name}: unexpected {shorten(unknown)}; write "
                "nats://host:4222?option=value"
            )
        user, colon, password = credentials.partition(":")
        return cls(
            name=name,
            servers=[f"{parts.scheme}://{host}" for host in hosts.split(",")],
            secure=parts.scheme == "tls",
            user=unquote(user) if user else None,
            password=unquote(password) if colon else None,
            tls=_tls(name, parts.scheme, options),
            api=f"$JS.{options.domain}.API" if options.domain else "$JS.API",
            options=options,
        )

    def unavailable(self, error: object) -> BrokerUnavailableError:
        """Return an error that says why NATS is unavailable."""
        if isinstance(error, BrokerUnavailableError):
            return error
        text = str(error).removeprefix("nats: ") or type(error).__name__
        refused = "uthorization" in text or "uthentication" in text
        lost = isinstance(error, OSError)
        problem = f"can't be {'reached' if lost else 'used'}"
        if refused:
            problem = "rejected the connection"
        # A file of credentials can change, and a server that starts can be too slow.
        is_final = refused and self.options.creds is None and "imeout" not in text
        kind = BrokerRefusedError if is_final else BrokerUnavailableError
        return kind(f"broker {self.name} {problem}: {text}")


def _tls(name: str, scheme: str, options: NatsOptions) -> ssl.SSLContext | None:
    files = {
        option: value
        for option in ("tls_ca", "tls_cert", "tls_key")
        if (value := getattr(options, option)) is not None
    }
    if scheme != "tls":
        if files:
            raise ConfigError(f"broker URL {name}: {', '.join(files)} needs tls://")
        return None
    try:
        context = ssl.create_default_context(cafile=options.tls_ca)
        if options.tls_cert is not None:
            context.load_cert_chain(options.tls_cert, options.tls_key)
    except (OSError, ValueError) as error:
        raise ConfigError(f"broker URL {name}: {', '.join(files)}: {error}") from None
    return context
