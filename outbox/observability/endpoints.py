"""The HTTP endpoints of a process: the option `--listen`."""

import logging
import re
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from pillarbox.outbox.errors import ConfigError

if TYPE_CHECKING:
    from pillarbox.outbox.observability.http_server import Handler

FORMS: Final = "8080, :8080, 127.0.0.1:8080, [::1]:8080, localhost:8080"
INHERITED: Final = "fd://"
"""Before the number of a listening socket that the parent process has opened."""

_ADDRESS: Final = re.compile(
    r"(?:(?:\[(?P<ipv6>[^\]]*)\]|(?P<host>[^:\[\]]*)):)?(?P<port>[0-9]+)", re.ASCII
)
_MAX_PORT: Final = 65535


def listen(address: str) -> socket.socket:
    """Open a socket that listens on `PORT`, `:PORT`, `HOST:PORT` or `[IPV6]:PORT`.

    Without a host, it listens on all IPv4 and IPv6 addresses. `fd://3` is a socket that
    the process has inherited.

    Raises:
        ConfigError: the text has none of these forms, or the process can't listen on
            the address.
    """
    number = address.removeprefix(INHERITED)
    if number != address and number.isdecimal():
        return _inherited(address, int(number))
    found = _ADDRESS.fullmatch(address.strip())
    if found is None or int(found["port"]) > _MAX_PORT:
        raise ConfigError(f"listen={address}: not an address; write one of {FORMS}")
    host, port = found["ipv6"] or found["host"], int(found["port"])
    try:
        if host:
            # A name can have several addresses; the first is the one that the system
            # prefers.
            family, _, _, _, where = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            return socket.create_server(where[:2], family=family)
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True
            )
        return socket.create_server(("", port))
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"listen={address}: {error}; choose a free port on an address of this host"
        ) from error


def _inherited(address: str, number: int) -> socket.socket:
    try:
        return socket.socket(fileno=number)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"listen={address}: {error}; pass the number of an inherited socket"
        ) from error


def address_of(listening: socket.socket) -> str:
    """Return the address of a listening socket, in a form that `listen` accepts."""
    host, port = listening.getsockname()[:2]
    if host in {"::", "0.0.0.0"}:  # noqa: S104
        return f":{port}"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@asynccontextmanager
async def listening(
    address: str, handlers: "Mapping[str, Handler]", *, level: int = logging.INFO
) -> AsyncIterator[str]:
    """Answer HTTP requests on an address for as long as the block runs; yield it.

    Args:
        handlers: the handlers of GET and HEAD requests, by path.
        level: at which the address is logged.

    Raises:
        ConfigError: the address is malformed, or the process can't listen on it.
    """
    from pillarbox.outbox.observability.http_server import serve

    opened = listen(address)
    where = address_of(opened)
    logging.getLogger("pillarbox").log(level, "listening on %s", where)
    async with serve(opened, handlers):
        yield where
