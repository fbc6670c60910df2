"""The addresses on which processes listen."""

import os
import socket

import pytest

from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.observability.endpoints import address_of, listen


def test_the_address_of_a_socket_can_be_listened_on_again() -> None:
    for text, host in (
        ("0", ""),
        (":0", ""),
        ("127.0.0.1:0", "127.0.0.1"),
        ("localhost:0", "127.0.0.1"),
        ("[::]:0", ""),
        ("[::1]:0", "[::1]"),
    ):
        with listen(text) as listening:
            address = address_of(listening)
        assert (text, address.rpartition(":")[0]) == (text, host)
        with listen(address) as again:
            assert address_of(again) == address


def test_an_inherited_socket_is_used_as_it_is() -> None:
    with listen("127.0.0.1:0") as opened:
        number = os.dup(opened.fileno())
        with listen(f"fd://{number}") as inherited:
            assert address_of(inherited) == address_of(opened)
    # The first of these is closed now; none can have the last one.
    for wrong in (number, 10**20):
        with pytest.raises(ConfigError, match=rf"listen=fd://{wrong}: .*inherited"):
            listen(f"fd://{wrong}")


def test_an_invalid_address_or_that_of_another_host_is_refused() -> None:
    for text in (
        *("", "here", "here:", "::1:8080", "[::1]", "1.2.3.4:http", "a:b:1", "-1"),
        *("fd://", "fd://x"),
    ):
        with pytest.raises(ConfigError, match=r"listen=.*not an address; write one"):
            listen(text)
    for text in (
        *("192.0.2.1:0", "no such host:0", "[::1:0", "65536", "127.0.0.1:65536"),
        "[x]:99999",
    ):
        with pytest.raises(ConfigError, match="listen="):
            listen(text)


def test_only_the_given_address_is_listened_on_and_all_without_one() -> None:
    with listen("127.0.0.2:0") as listening:
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.2", port), timeout=60):
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=60)
    with listen(":0") as everywhere:
        port = everywhere.getsockname()[1]
        for host in ("127.0.0.1", *["::1"] * socket.has_ipv6):
            with socket.create_connection((host, port), timeout=60):
                pass
