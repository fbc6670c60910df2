"""The address of an endpoint: `--health-listen` and `--metrics-listen`."""

import re
import socket
from dataclasses import dataclass
from typing import Final, Self

from typing_extensions import override

from outbox.errors import ConfigError

FORMS: Final = "8080, :8080, 127.0.0.1:8080, [::1]:8080, localhost:8080"

_ADDRESS: Final = re.compile(
    r"(?:(?:\[(?P<ipv6>[^\]]*)\]|(?P<host>[^:\[\]]*)):)?(?P<port>[0-9]+)", re.ASCII
)
_MAX_PORT: Final = 65535


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """An address and a port to listen on.

    Attributes:
        host: a name or an IP address, IPv6 without brackets; empty: all addresses,
            IPv4 and IPv6.
        port: 0: any that is free.
    """

    host: str
    port: int

    @classmethod
    def read(cls, text: str, option: str) -> Self:
        """Read `PORT`, `:PORT`, `HOST:PORT` or `[IPV6]:PORT`.

        Raises:
            ConfigError: it is none of these; it names the option.
        """
        found = _ADDRESS.fullmatch(text.strip())
        if found is None:
            raise ConfigError(f"{option}={text}: not an address; write one of {FORMS}")
        port = int(found["port"])
        if port > _MAX_PORT:
            raise ConfigError(
                f"{option}={text}: port {port} is above {_MAX_PORT}; "
                "choose one from 1 to 65535, or 0 for any that is free"
            )
        return cls(found["ipv6"] or found["host"] or "", port)

    def listen(self, option: str) -> socket.socket:
        """Open a socket that listens there.

        Raises:
            ConfigError: that can't be listened on; it names the option.
        """
        try:
            if not self.host:
                return self._listen_everywhere()
            # The first is the one that the system prefers; a name may have several.
            family, _, _, _, address = socket.getaddrinfo(
                self.host,
                self.port,
                type=socket.SOCK_STREAM,
                flags=socket.AI_PASSIVE,
            )[0]
            return socket.create_server(address[:2], family=family)
        except (OSError, UnicodeError) as error:
            raise ConfigError(
                f"{option}={self}: {error}; "
                "choose a free port on an address of this host"
            ) from error

    def _listen_everywhere(self) -> socket.socket:
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", self.port), family=socket.AF_INET6, dualstack_ipv6=True
            )
        return socket.create_server(("", self.port))

    @override
    def __str__(self) -> str:
        """Give it as it can be read again."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def address_of(listening: socket.socket) -> ListenAddress:
    """Tell where a socket listens, with the port that was chosen."""
    host, port = listening.getsockname()[:2]
    return ListenAddress("" if host in {"::", "0.0.0.0"} else host, port)  # noqa: S104
