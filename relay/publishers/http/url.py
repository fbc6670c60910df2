"""What the URL of a web hook says: where to post, and how."""

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Final, Self

from typing_extensions import override
from yarl import URL

from outbox.cloudevents.signature import Secret, read_secrets
from outbox.errors import ConfigError, shorten
from outbox.url import take_options, whole_number, without_password

_FLAGS: Final = ("allow_private", "unsigned")
_NUMBERS: Final = ("max_connections", "max_payload_bytes")
_TIMES: Final = ("timeout", "connect_timeout", "max_retry_after")
_TEXTS: Final = ("secret", "secret_env", "ca_file")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class HttpSettings:
    """How to post to one address.

    Attributes:
        url: `http://` or `https://`.
        secrets: each signs every request; with none requests aren't signed.
        allow_private: let the address be one of our own network.
        ca_file: certificates of authorities to be trusted beside the system's.
        max_connections: open to the host at once, and so requests at once.
        max_payload_bytes: a payload above it is nacked as permanent.
        timeout: of one request.
        connect_timeout: of one connection.
        max_retry_after: the longest pause that the host may ask for, for itself or
            for one message.
    """

    url: str
    secrets: tuple[Secret, ...]
    allow_private: bool = False
    ca_file: str | None = None
    max_connections: int = 16
    max_payload_bytes: int = 1024 * 1024
    timeout: timedelta = timedelta(seconds=10)
    connect_timeout: timedelta = timedelta(seconds=5)
    max_retry_after: timedelta = timedelta(minutes=2)

    def __post_init__(self) -> None:
        """Refuse what can't be used."""
        for name in ("max_connections", "max_payload_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1")
        for name in ("timeout", "connect_timeout", "max_retry_after"):
            if getattr(self, name) <= timedelta(0):
                raise ConfigError(f"{name}={getattr(self, name)}: must be above 0")
        try:
            url = self.target
            usable = url.scheme in {"http", "https"} and url.raw_host and url.port
        except ValueError:
            usable = False
        if not usable or "#" in self.url:
            raise ConfigError(
                f"broker URL {self.name}: write https://host/path?secret_env=NAME"
            )

    @classmethod
    def from_url(cls, text: str) -> Self:
        """Read the URL's own options; the rest of its query is the receiver's.

        Raises:
            ConfigError: it isn't such a URL, or there is no secret.
        """
        url, options = take_options(text, (*_FLAGS, *_NUMBERS, *_TIMES, *_TEXTS))
        if "secret" in options:
            raise ConfigError(
                "broker URL option secret: URLs get printed; put it into an "
                "environment variable and write secret_env=THE_NAME"
            )
        arguments: dict[str, Any] = {n: _flag(options, n) for n in _FLAGS}
        for name in options.keys() & {*_NUMBERS, *_TIMES}:
            number = whole_number(name, options[name])
            arguments[name] = number if name in _NUMBERS else timedelta(seconds=number)
        unsigned = arguments.pop("unsigned")
        return cls(
            url=url,
            secrets=() if unsigned else _secrets(options.get("secret_env")),
            ca_file=options.get("ca_file"),
            **arguments,
        )

    @override
    def __repr__(self) -> str:
        """Show the settings, of the URL only what may be printed."""
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        shown["url"] = self.name
        return f"HttpSettings({', '.join(f'{n}={v!r}' for n, v in shown.items())})"

    @property
    def name(self) -> str:
        """The URL as it may be printed."""
        return without_password(self.url)

    @property
    def target(self) -> URL:
        """Where to post."""
        return URL(self.url)

    def tls(self) -> ssl.SSLContext | None:
        """Make the context that verifies the host, if the URL asks for TLS.

        Raises:
            ConfigError: `ca_file` can't be read.
        """
        if self.target.scheme != "https":
            return None
        context = ssl.create_default_context()
        if self.ca_file is not None:
            try:
                context.load_verify_locations(self.ca_file)
            except OSError as error:
                raise ConfigError(
                    f"broker URL option ca_file={shorten(self.ca_file)}: {error}; "
                    "name a file of certificates in PEM"
                ) from None
        return context


def _flag(options: Mapping[str, str], name: str) -> bool:
    value = options.get(name, "false")
    if value not in {"true", "false"}:
        raise ConfigError(
            f"broker URL option {name}={shorten(value)}: write true or false"
        )
    return value == "true"


def _secrets(variable: str | None) -> tuple[Secret, ...]:
    if not variable:
        raise ConfigError(
            "broker URL: names no secret to sign with; write secret_env=THE_NAME of "
            "the environment variable that holds it, or unsigned=true"
        )
    text = os.environ.get(variable)
    if text is None:
        raise ConfigError(
            f"broker URL option secret_env={shorten(variable)}: there is no such "
            "environment variable; set it to whsec_…"
        )
    return read_secrets(text)
