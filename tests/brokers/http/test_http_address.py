"""The addresses to which a webhook may be posted."""

import socket

import pytest

from pillarbox.relay.publishers.http.address import is_public, socket_maker

PUBLIC = [
    "1.1.1.1",
    "168.63.129.15",
    "168.63.129.17",
    "93.184.215.14",
    "172.32.0.1",
    "2606:4700:4700::1111",
    "::ffff:1.1.1.1",
]
NOT_PUBLIC = [
    "0.0.0.0",
    "10.1.2.3",
    "100.64.0.1",
    "127.0.0.1",
    "127.255.255.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.8",
    "192.0.2.1",
    "192.168.1.1",
    "198.18.0.1",
    "203.0.113.9",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::7f00:1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::ffff:0:7f00:1",
    "64:ff9b::7f00:1",
    "100::1",
    "2001::7f00:1",
    "2001:db8::1",
    "2002:7f00:1::",
    "fc00::1",
    "fd12:3456::1",
    "fe80::1",
    "fe80::1%lo",
    "fec0::1",
    "ff02::1",
]
# Addresses of clouds' metadata services, which give out credentials, in every notation.
METADATA = [
    "169.254.169.254",  # AWS, Azure, Google and most others
    "169.254.170.2",  # AWS ECS
    "169.254.0.23",  # Tencent
    "fd00:ec2::254",  # AWS
    "fd20:ce::254",  # Google
    "fd00:c1::a9fe:a9fe",  # Oracle
    "100.100.100.200",  # Alibaba
    "192.0.0.192",  # Oracle
    "168.63.129.16",  # Azure's WireServer, DHCP and DNS: a public address
    "::ffff:168.63.129.16",
    "::ffff:a83f:8110",
    "64:ff9b::168.63.129.16",
    "64:ff9b:1::a9fe:a9fe",
    "::ffff:169.254.169.254",
    "64:ff9b::a9fe:a9fe",
    "2002:a83f:8110::1",
    "2001:0:a83f:8110::1",
]
# Text that resolvers accept as an address, and ipaddress doesn't.
NO_ADDRESS = ["2130706433", "0x7f000001", "127.1", "0177.0.0.1", "localhost", ""]


@pytest.mark.parametrize("address", PUBLIC)
def test_internet_addresses_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("address", [*NOT_PUBLIC, *METADATA, *NO_ADDRESS])
def test_other_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["10.1.2.3", "169.254.169.254", "localhost"])
def test_no_socket_is_opened_to_a_private_address_unless_allowed(address: str) -> None:
    info = (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80))
    with pytest.raises(PermissionError, match="not a public address"):
        socket_maker(allow_private=False)(info)
    socket_maker(allow_private=True)(info).close()
