"""Split broker and database URLs, and print them without secrets."""

import re
from pathlib import Path
from typing import Final, Self
from urllib.parse import SplitResult, urlsplit

from pillarbox.outbox.errors import ConfigError, PrerequisiteError

_OF_POSTGRESQL: Final = ("postgresql", "postgres")
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_SECRETS: Final = re.compile(
    r"[A-Za-z][A-Za-z0-9+.-]*://\S+|\bpassword\s*=\s*(?:'[^']*'|\S+)|\bwhsec_\S+"
    r"|[^\s:@/]+:(?!//)[^\s@]+@\S+"
)


class FileUrl(str):
    """A URL that a file held when it was read; `current` reads the file again.

    Attributes:
        variable: the environment variable that names the file.
    """

    variable: str
    _path: str

    @classmethod
    def read(cls, variable: str, path: str) -> Self:
        """Read a file.

        Raises:
            PrerequisiteError: it can't be read, or is empty.
        """
        url, problem = cls(), "is empty"
        try:
            url = cls(Path(path).read_text(encoding="utf-8").strip())
        except (OSError, ValueError) as error:
            problem = getattr(error, "strerror", None) or "not UTF-8"
        if not url:
            raise PrerequisiteError(
                f"{variable}={without_secrets(path)}: {problem}; let it name a text "
                "file that holds a URL and that this user may read"
            )
        url.variable, url._path = variable, path
        return url

    def current(self) -> str:
        """Return what the file holds now, since passwords are rotated.

        Raises:
            PrerequisiteError: as `read`.
        """
        return str(self.read(self.variable, self._path))


def scheme_of(url: str) -> str:
    """Return the scheme of a URL, without the driver that SQLAlchemy puts into it.

    It is empty if the text is no URL, such as a connection string with a password.
    """
    scheme, colon, _ = url.partition(":")
    if not colon or _SCHEME.fullmatch(scheme) is None:
        return ""
    name = scheme.partition("+")[0]
    return name if name in _OF_POSTGRESQL else scheme


def split(url: str) -> SplitResult:
    """Split a broker URL, which may name several hosts, separated by commas.

    Raises:
        ConfigError: the address in it is invalid.
    """
    try:
        url.encode()
        parts = urlsplit(url)
        hosts = parts.netloc.rpartition("@")[2].split(",") if parts.netloc else []
        addresses = [urlsplit(f"//{host}") for host in hosts]
        # Reading the port checks it; a host is empty if a variable wasn't set.
        is_valid = all(it.port != 0 and it.hostname for it in addresses)
    except ValueError:
        raise _invalid(url) from None  # urllib's message may quote the password
    if not is_valid:
        raise _invalid(url)
    return parts


def _invalid(url: str) -> ConfigError:
    return ConfigError(
        f"broker URL {without_password(url)}: invalid address; write "
        "scheme://host:port, and percent-encode special characters in user and "
        "password (%40 for @)"
    )


def without_password(url: str) -> str:
    """Return a URL, well-formed or not, without its secrets; of other texts, nothing.

    The path of a webhook is often its secret.
    """
    scheme, mark, address = url.partition("://")
    if not mark or _SCHEME.fullmatch(scheme) is None:
        return "…" if url else ""
    start = scheme + mark
    rest, _, query = address.partition("?")
    if scheme.lower() in {"http", "https"}:
        host, slash, path = rest.partition("/")
        rest = f"{host}/…" if path else host + slash
        if "@" in path:
            return f"{start}…"  # the host may be part of a password
    # Up to the last @: a password may contain others that weren't encoded.
    credentials, at, place = rest.rpartition("@")
    if not at and "@" in query:
        place = place.partition(":")[0]
    user, colon, _ = credentials.partition(":")
    # A user without a password may be a token, as in NATS, but not in a database's URL.
    shown = user if colon or start.startswith("postgres") else ""
    return f"{start}{shown}{at}{place}"


def without_secrets(text: str) -> str:
    """Return a text that quotes URLs or connection strings, without their secrets."""
    return _SECRETS.sub(
        lambda found: without_password(found[0]) if "://" in found[0] else "…", text
    )
