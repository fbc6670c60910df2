"""Broker and database URLs: their parts, and what of them may be printed."""

from urllib.parse import SplitResult, urlsplit

from outbox.errors import ConfigError


def split(url: str) -> SplitResult:
    """Take a broker's URL apart; it may name several hosts, with commas between.

    Raises:
        ConfigError: its address is invalid.
    """
    try:
        url.encode()
        parts = urlsplit(url)
        for host in parts.netloc.rpartition("@")[2].split(","):
            _ = urlsplit(f"//{host}").port  # read, and so checked, only here
    except ValueError:
        # What urllib says may quote the password.
        raise ConfigError(
            f"broker URL {without_password(url)}: invalid address; write "
            "scheme://host:port, and percent-encode special characters in user and "
            "password (%40 for @)"
        ) from None
    return parts


def without_password(url: str) -> str:
    """Return a URL, well-formed or not, without its secrets."""
    start = url[: url.find("://") + 3] if "://" in url else ""
    rest, _, query = url.removeprefix(start).partition("?")
    # Up to the last one: a password may hold others that nobody encoded.
    credentials, at, place = rest.rpartition("@")
    if not at and "@" in query:
        place = place.partition(":")[0]
    user, colon, _ = credentials.partition(":")
    # By itself it may be a token, as NATS has; a database's user is none.
    shown = user if colon or start.startswith("postgres") else ""
    return f"{start}{shown}{at}{place}"
