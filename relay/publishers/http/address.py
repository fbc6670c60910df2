"""Limits the addresses of webhooks to public ones, unless all are allowed."""

import socket
from collections.abc import Callable
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
)
from typing import Any, Final, TypeAlias

AddressInfo: TypeAlias = tuple[Any, Any, int, str, Any]
"""One entry of the result of `getaddrinfo`."""

# Listed here because Python versions differ in what `ipaddress` considers private.
_NOT_PUBLIC_4: Final = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8",
            "10.0.0.0/8",
            "100.64.0.0/10",
            "127.0.0.0/8",
            # Azure's metadata, DHCP and DNS services, although the address is public.
            "168.63.129.16/32",
            "169.254.0.0/16",
            "172.16.0.0/12",
            "192.0.0.0/24",
            "192.0.2.0/24",
            "192.88.99.0/24",
            "192.168.0.0/16",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/3",
        ),
    )
)
_PUBLIC_6: Final = IPv6Network("2000::/3")
# They include tunnels to IPv4, which can embed any address.
_NOT_PUBLIC_6: Final = tuple(
    map(IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"))
)


def is_public(text: str) -> bool:
    """Return whether a text is a public Internet address."""
    try:
        address: IPv4Address | IPv6Address = ip_address(text)
    except ValueError:
        return False
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is None:
            return address in _PUBLIC_6 and not any(
                address in network for network in _NOT_PUBLIC_6
            )
        address = address.ipv4_mapped
    return not any(address in network for network in _NOT_PUBLIC_4)


def socket_maker(*, allow_private: bool) -> Callable[[AddressInfo], socket.socket]:
    """Return a function that opens the socket for an address, or rejects the address.

    It checks the address of the actual connection, so a name can't evade the check by
    resolving to a different address the second time.
    """

    def make(info: AddressInfo) -> socket.socket:
        family, kind, protocol, _, address = info
        if not allow_private and not is_public(address[0]):
            raise PermissionError(
                f"{address[0]} is not a public address (allow_private)"
            )
        return socket.socket(family, kind, protocol)

    return make
