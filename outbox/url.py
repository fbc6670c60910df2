"""Options of our own in the query of a broker's URL."""

from collections.abc import Collection
from urllib.parse import unquote

from outbox.errors import ConfigError, shorten


def take_options(url: str, names: Collection[str]) -> tuple[str, dict[str, str]]:
    """Take our own options out of the query; the client library gets the rest."""
    start, _, query = url.partition("?")
    ours: dict[str, str] = {}
    rest = []
    for part in query.split("&"):
        name, _, value = part.partition("=")
        if name in names:
            ours[name] = unquote(value)
        elif part:
            rest.append(part)
    return "?".join([start, "&".join(rest)] if rest else [start]), ours


def whole_number(name: str, value: str) -> int:
    """Read an option that is a number from 1.

    Raises:
        ConfigError: it isn't.
    """
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(
            f"broker URL option {name}={shorten(value)}: write a whole number from 1"
        )
    return int(value)
