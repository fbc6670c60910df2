"""Split broker and database URLs, and print them without secrets."""

from pathlib import Path
from typing import Final, Self
from urllib.parse import SplitResult, urlsplit

from outbox.errors import ConfigError

_OF_POSTGRESQL: Final = ("postgresql", "postgres")


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
            ConfigError: it can't be read.
        """
        try:
            url = cls(Path(path).read_text(encoding="utf-8").strip())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{variable}={path}: {error}; let it name a text file that holds a URL "
                "and that this user may read"
            ) from error
        url.variable, url._path = variable, path
        return url

    def current(self) -> str:
        """Return what the file holds now, since passwords are rotated.

        Raises:
            ConfigError: it can't be read.
        """
        return str(self.read(self.variable, self._path))


def scheme_of(url: str) -> str:
    """Return the scheme of a URL, without the driver that SQLAlchemy puts into it."""
    scheme = url.partition(":")[0]
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
    """Return a URL, well-formed or not, without its secrets."""
    start = url[: url.find("://") + 3] if "://" in url else ""
    rest, _, query = url.removeprefix(start).partition("?")
    # Up to the last @: a password may contain others that weren't encoded.
    credentials, at, place = rest.rpartition("@")
    if not at and "@" in query:
        place = place.partition(":")[0]
    user, colon, _ = credentials.partition(":")
    # A user without a password may be a token, as in NATS, but not in a database's URL.
    shown = user if colon or start.startswith("postgres") else ""
    return f"{start}{shown}{at}{place}"
