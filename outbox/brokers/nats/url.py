"""What a broker URL says about a connection to NATS with JetStream."""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Self
from urllib.parse import unquote, urlsplit

from outbox.errors import BrokerUnavailableError, ConfigError, shorten
from outbox.url import split, take_options, without_password

CONNECTION_OPTIONS: Final = (
    "stream",
    "create",
    "creds",
    "domain",
    "inbox_prefix",
    "tls_ca",
    "tls_cert",
    "tls_key",
)
_FORBIDDEN: Final = frozenset(" \t\r\n.*>/\\")


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsSettings:
    """What a broker URL says about the connection and the stream."""

    name: str
    servers: list[str]
    secure: bool
    user: str | None = field(repr=False)  # by itself it is a token
    password: str | None = field(repr=False)
    tls: ssl.SSLContext | None
    creds: str | None
    inbox_prefix: str
    api: str
    stream: str | None
    create: list[str]

    @classmethod
    def from_url(
        cls, url: str, options: tuple[str, ...] = ()
    ) -> tuple[Self, dict[str, str]]:
        """Read a URL; give the caller's own options, too.

        Raises:
            ConfigError: it can't be used.
        """
        name = without_password(url)
        rest, found = take_options(url, (*CONNECTION_OPTIONS, *options))
        parts = split(rest)
        credentials, _, hosts = parts.netloc.rpartition("@")
        if parts.scheme not in {"nats", "tls"} or not all(hosts.split(",")):
            raise ConfigError(f"broker URL {name}: write nats://host:4222")
        if parts.query or parts.path not in {"", "/"} or parts.fragment:
            unknown = parts.query or parts.path or parts.fragment
            known = ", ".join((*CONNECTION_OPTIONS, *options))
            raise ConfigError(
                f"broker URL {name}: {shorten(unknown)} means nothing here; "
                f"the options are {known}"
            )
        servers = [f"{parts.scheme}://{host}" for host in hosts.split(",")]
        for server in servers:
            address = urlsplit(server)
            if not address.hostname or address.port == 0:
                raise ConfigError(
                    f"broker URL {name}: {server} is no address; write nats://host:4222"
                )
        ours = {option: found.pop(option, "") for option in CONNECTION_OPTIONS}
        if ours["create"] and not ours["stream"]:
            raise ConfigError(
                f"broker URL {name}: create= takes stream=, the name of the stream"
            )
        user, colon, password = credentials.partition(":")
        domain = ours["domain"]
        settings = cls(
            name=name,
            servers=servers,
            secure=parts.scheme == "tls",
            user=unquote(user) if user else None,
            password=unquote(password) if colon else None,
            tls=_tls(name, parts.scheme, ours),
            creds=ours["creds"] or None,
            inbox_prefix=ours["inbox_prefix"] or "_INBOX",
            api=f"$JS.{name_option('domain', domain)}.API" if domain else "$JS.API",
            stream=name_option("stream", ours["stream"]) if ours["stream"] else None,
            create=[subject for subject in ours["create"].split(",") if subject],
        )
        return settings, found

    def away(self, error: object) -> BrokerUnavailableError:
        """Say why NATS can't be used now."""
        if isinstance(error, BrokerUnavailableError):
            return error
        text = str(error).removeprefix("nats: ") or type(error).__name__
        refused = "uthorization" in text or "uthentication" in text
        lost = isinstance(error, OSError)
        said = "refuses us" if refused else f"can't be {'reached' if lost else 'used'}"
        return BrokerUnavailableError(f"broker {self.name} {said}: {text}")


def name_option(option: str, value: str) -> str:
    """Check the name of a stream, a consumer or a domain.

    Raises:
        ConfigError: NATS would refuse it.
    """
    if not value or not value.isprintable() or set(value) & _FORBIDDEN:
        raise ConfigError(
            f"{option} {shorten(value)}: NATS takes no such name; use letters, "
            "digits, - and _"
        )
    return value


def _tls(name: str, scheme: str, options: Mapping[str, str]) -> ssl.SSLContext | None:
    files = {n: v for n, v in options.items() if n.startswith("tls_") and v}
    if scheme != "tls":
        if files:
            raise ConfigError(f"broker URL {name}: {', '.join(files)} takes tls://")
        return None
    try:
        context = ssl.create_default_context(cafile=files.get("tls_ca"))
        if "tls_cert" in files:
            context.load_cert_chain(files["tls_cert"], files.get("tls_key"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"broker URL {name}: {', '.join(files)}: {error}") from None
    return context
