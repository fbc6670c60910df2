"""The HTTP endpoints of a process: the option `--listen`."""

import logging
import re
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from typing_extensions import override

from outbox.errors import ConfigError

if TYPE_CHECKING:
    from outbox.observability.http_server import Handler

FORMS: Final = "8080, :8080, 127.0.0.1:8080, [::1]:8080, localhost:8080"

_ADDRESS: Final = re.compile(
    r"(?:(?:\[(?P<ipv6>[^\]]*)\]|(?P<host>[^:\[\]]*)):)?(?P<port>[0-9]+)", re.ASCII
)
_MAX_PORT: Final = 65535


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """An address and a port to listen on.

    Attributes:
        host: a name or an IP address, IPv6 without brackets; if empty, all IPv4 and
            IPv6 addresses.
        port: the port; 0 for any free one.
    """

    host: str
    port: int

    @classmethod
    def read(cls, text: str) -> Self:
        """Read `PORT`, `:PORT`, `HOST:PORT` or `[IPV6]:PORT`.

        Raises:
            ConfigError: the text has none of these forms.
        """
        found = _ADDRESS.fullmatch(text.strip())
        if found is None:
            raise ConfigError(f"listen={text}: not an address; write one of {FORMS}")
        port = int(found["port"])
        if port > _MAX_PORT:
            raise ConfigError(
                f"listen={text}: port {port} is above {_MAX_PORT}; "
                "choose one from 1 to 65535, or 0 for any free port"
            )
        return cls(found["ipv6"] or found["host"] or "", port)

    def listen(self) -> socket.socket:
        """Open a socket that listens on this address.

        Raises:
            ConfigError: the process can't listen on the address.
        """
        try:
            if not self.host:
                return self._listen_everywhere()
            # A name can have several addresses; the first is the one that the system
            # prefers.
            family, _, _, _, address = socket.getaddrinfo(
                self.host,
                self.port,
                type=socket.SOCK_STREAM,
                flags=socket.AI_PASSIVE,
            )[0]
            return socket.create_server(address[:2], family=family)
        except (OSError, UnicodeError) as error:
            raise ConfigError(
                f"listen={self}: {error}; choose a free port on an address of this host"
            ) from error

    def _listen_everywhere(self) -> socket.socket:
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", self.port), family=socket.AF_INET6, dualstack_ipv6=True
            )
        return socket.create_server(("", self.port))

    @override
    def __str__(self) -> str:
        """Write the address in a form that `read` accepts."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def address_of(listening: socket.socket) -> ListenAddress:
    """Return the address of a listening socket, with the port that was chosen."""
    host, port = listening.getsockname()[:2]
    return ListenAddress("" if host in {"::", "0.0.0.0"} else host, port)  # noqa: S104


@asynccontextmanager
async def listening(
    address: str, handlers: "Mapping[str, Handler]"
) -> AsyncIterator[None]:
    """Answer HTTP requests on an address for as long as the block runs.

    Args:
        handlers: the handlers of GET and HEAD requests, by path.

    Raises:
        ConfigError: the address is malformed, the process can't listen on it, or
            aiohttp isn't installed.
    """
    where = ListenAddress.read(address)
    try:
        from outbox.observability.http_server import serve
    except ImportError as error:
        raise ConfigError(
            f"listen={where}: {error}; pip install 'pillarbox[cli]'"
        ) from error
    opened = where.listen()
    logging.getLogger("pillarbox").info("listening on %s", address_of(opened))
    async with serve(opened, handlers):
        yield
