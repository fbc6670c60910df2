"""The cheapest possible webhook receiver: it accepts every request.

It runs in its own process, prints its port, and ends when its standard input is closed.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from typing_extensions import override

HEAD_END = b"\r\n\r\n"
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
TAKEN = b"HTTP/1.1 204 No Content\r\n\r\n"


class Receiver(asyncio.Protocol):
    """One connection; its requests can be pipelined."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    @override
    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._received += data
        while (head := self._received.find(HEAD_END)) >= 0:
            length = LENGTH.search(self._received, 0, head)
            size = head + len(HEAD_END) + (int(length[1]) if length else 0)
            if len(self._received) < size:
                return
            del self._received[:size]
            self._transport.write(TAKEN)


@contextmanager
def http_sink() -> Iterator[int]:
    """Start a receiver and yield its port; kill it after the block."""
    command = [sys.executable, "-m", "benchmarks.http_sink"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


async def serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Receiver, "127.0.0.1", 0, backlog=128)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve())
