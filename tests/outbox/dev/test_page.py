"""The socket of the page: nobody takes its address, from the start to the end."""

import socket

from outbox.dev.page import open_page
from outbox.observability.endpoints import address_of


def test_two_that_start_at_once_get_two_addresses() -> None:
    with open_page() as first, open_page() as second:
        assert address_of(first) != address_of(second)
        for page in (first, second):
            with socket.create_connection(page.getsockname(), timeout=60):
                pass
