"""The socket of the page of `pillarbox dev`."""

import socket
from typing import Final

PORT: Final = 8380


def open_page() -> socket.socket:
    """Listen on the usual port of this machine, or on a free one if it is in use.

    The page gets the socket itself: whoever starts later can't take its port, and while
    the page starts again, browsers wait.
    """
    try:
        return socket.create_server(("127.0.0.1", PORT))
    except OSError:
        return socket.create_server(("127.0.0.1", 0))
