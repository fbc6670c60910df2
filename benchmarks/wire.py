"""A proxy before PostgreSQL that counts the statements and round trips of a process."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Thread
from urllib.parse import urlsplit

_HEADER = "-- Does:"
_SHOWN = 60


@dataclass(slots=True)
class Wire:
    """What has passed since the proxy began.

    Attributes:
        statements: how often each was executed, by its first line.
        round_trips: how often a client sent something after the server's answer.
    """

    statements: Counter[str] = field(default_factory=Counter)
    round_trips: int = 0


@contextmanager
def proxied(url: str) -> Iterator[tuple[str, Wire]]:
    """Yield a URL that leads through a proxy, and what it counts."""
    parts, wire, loop = urlsplit(url), Wire(), asyncio.new_event_loop()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _Session(wire).run(
            reader,
            writer,
            *await asyncio.open_connection(parts.hostname, parts.port),
        )

    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0))
    port = server.sockets[0].getsockname()[1]
    thread = Thread(target=loop.run_forever)
    thread.start()
    address = f"{parts.netloc.rpartition('@')[0]}@127.0.0.1:{port}{parts.path}"
    try:
        yield f"postgresql://{address}?sslmode=disable&gssencmode=disable", wire
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        loop.run_until_complete(_end())
        loop.close()


async def _end() -> None:
    # A connection that was just accepted gets its task only now.
    await asyncio.sleep(0)
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # sockets that were aborted are closed


class _Session:
    """One connection."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._was_answered = True
        self._prepared: dict[bytes, str] = {}

    async def run(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        from_server: asyncio.StreamReader,
        to_server: asyncio.StreamWriter,
    ) -> None:
        async def answer() -> None:
            while data := await from_server.read(1 << 16):
                self._was_answered = True
                writer.write(data)
            writer.close()

        answering = asyncio.create_task(answer())
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                # Only the first message has no type.
                kind = b""
                while True:
                    size = await reader.readexactly(4)
                    body = await reader.readexactly(int.from_bytes(size) - 4)
                    self._count(kind, body)
                    to_server.write(kind + size + body)
                    kind = await reader.readexactly(1)
            to_server.close()
            with suppress(ConnectionError):
                await answering
        finally:
            for each in (writer, to_server):
                each.transport.abort()

    def _count(self, kind: bytes, body: bytes) -> None:
        if self._was_answered:
            self._was_answered = False
            self._wire.round_trips += 1
        match kind:
            case b"P":
                name, text, _ = body.split(b"\0", 2)
                self._prepared[name] = _label(text)
            case b"B":
                _, name, _ = body.split(b"\0", 2)
                self._wire.statements[self._prepared[name]] += 1
            case b"Q":
                self._wire.statements[_label(body.rstrip(b"\0"))] += 1


def _label(statement: bytes) -> str:
    first = statement.decode().strip().partition("\n")[0]
    return first.removeprefix(_HEADER).strip()[:_SHOWN]
