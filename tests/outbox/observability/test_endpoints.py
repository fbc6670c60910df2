"""The addresses on which processes listen."""

import socket

import pytest

from outbox.errors import ConfigError
from outbox.observability.endpoints import ListenAddress, address_of


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("8080", "", 8080),
        (":8080", "", 8080),
        ("0", "", 0),
        ("127.0.0.1:8080", "127.0.0.1", 8080),
        ("localhost:0", "localhost", 0),
        ("[::]:8080", "::", 8080),
        ("[::1]:65535", "::1", 65535),
    ],
)
def test_an_address_is_parsed_and_printed(text: str, host: str, port: int) -> None:
    address = ListenAddress.read(text)
    assert address == ListenAddress(host, port)
    assert ListenAddress.read(str(address)) == address


@pytest.mark.parametrize(
    "text", ["", "here", "here:", "::1:8080", "[::1]", "1.2.3.4:http", "a:b:1", "-1"]
)
def test_the_error_for_an_invalid_address_shows_the_formats(text: str) -> None:
    with pytest.raises(ConfigError, match=r"listen=.*not an address; write one"):
        ListenAddress.read(text)


@pytest.mark.parametrize("text", ["192.0.2.1:0", "no such host:0", "[::1:0"])
def test_an_address_of_another_host_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="listen="):
        ListenAddress.read(text).listen()


def test_only_the_given_address_is_listened_on() -> None:
    with ListenAddress("127.0.0.2", 0).listen() as listening:
        port = address_of(listening).port
        with socket.create_connection(("127.0.0.2", port), timeout=60):
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=60)
