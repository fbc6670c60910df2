"""The settings in the URL of a webhook: where to post, and how."""

import os
import ssl
from dataclasses import dataclass, fields
from typing import Self

from typing_extensions import override
from yarl import URL

from pillarbox.outbox.brokers.http import HttpOptions
from pillarbox.outbox.cloudevents.signature import Secret, read_secrets
from pillarbox.outbox.errors import ConfigError, shorten
from pillarbox.outbox.url import without_password


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class HttpSettings:
    """Where and how to post messages.

    Attributes:
        url: `http://` or `https://`, without the options of `HttpOptions`.
        secrets: each signs every request; without any, requests aren't signed.
        options: the options in the URL.
    """

    url: str
    secrets: tuple[Secret, ...]
    options: HttpOptions

    def __post_init__(self) -> None:
        """Reject a URL that can't be posted to."""
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
        """Parse the URL's options; the rest of its query is sent to the receiver.

        Raises:
            ConfigError: the URL can't be used, or there is no secret.
        """
        url, options = HttpOptions.parse(text)
        secrets = () if options.unsigned else _secrets(options.secret_env)
        return cls(url=url, secrets=secrets, options=options)

    @override
    def __repr__(self) -> str:
        """Show the settings, without the URL's secrets."""
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        shown["url"] = self.name
        return f"HttpSettings({', '.join(f'{n}={v!r}' for n, v in shown.items())})"

    @property
    def name(self) -> str:
        """The URL without its secrets."""
        return without_password(self.url)

    @property
    def target(self) -> URL:
        """The URL to post to."""
        return URL(self.url)

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS context that verifies the host, or None for `http://`.

        Raises:
            ConfigError: `ca_file` can't be read.
        """
        if self.target.scheme != "https":
            return None
        context = ssl.create_default_context()
        if self.options.ca_file is not None:
            try:
                context.load_verify_locations(self.options.ca_file)
            except OSError as error:
                raise ConfigError(
                    f"broker URL option ca_file={shorten(self.options.ca_file)}: "
                    f"{error}; name a file of certificates in PEM"
                ) from None
        return context


def _secrets(variable: str | None) -> tuple[Secret, ...]:
    if not variable:
        raise ConfigError(
            "broker URL: no secret to sign with; add secret_env=NAME, an environment"
            " variable that holds the secret, or unsigned=true"
        )
    text = os.environ.get(variable)
    if text is None:
        raise ConfigError(
            "broker URL option secret_env: no such environment variable is set; write"
            " the name of one that holds whsec_…, not the secret itself"
        )
    return read_secrets(text)
