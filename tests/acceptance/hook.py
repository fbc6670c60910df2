"""A receiver of webhooks in a process of its own, to count at or to be killed.

`recorder` appends to a file whatever it takes, one line for each request. `counting`
handles messages in a database, by the endpoint that we ship.
"""

import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, Self

from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from inbox.webhook import Verifier, webhook_app
from outbox.observability.logging import LogEvents
from outbox.postgres.connection import sqlalchemy_url
from outbox.testing.lifetime import free_port
from tests.acceptance.counter import count
from tests.fixtures.http import SECRET
from tests.fixtures.processes import RunningProcess, command_line

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_FILE = "PILLARBOX_TEST_ARRIVALS"


async def recorder(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    """Write id, key and number down before they are acked."""
    body, more = b"", True
    while more:
        event = await receive()
        body += event.get("body", b"")
        more = event.get("more_body", False)
    arrivals = Path(os.environ[_FILE])
    if closed_sign(arrivals).exists():
        await answer(send, 503)
        return
    headers = {n.decode(): v.decode() for n, v in scope["headers"]}
    message = Verifier([SECRET]).read(headers, body)
    line = f"{message.id} {message.key} {int(message.payload)}\n"
    file = os.open(arrivals, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, line.encode())
    os.close(file)
    await answer(send, 204)


async def answer(send: Send, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def closed_sign(arrivals: Path) -> Path:
    """Where the file lies that makes the recorder answer 503."""
    return arrivals.with_suffix(".closed")


def counting() -> Any:
    """Make the endpoint; its effects are rows in `counted`."""
    url = os.environ["PILLARBOX_DATABASE_URL"]
    engine = create_async_engine(sqlalchemy_url(url), pool_size=8)
    return webhook_app(
        {"numbers.*": count},
        async_sessionmaker(engine),
        name="counter",
        secrets=[SECRET],
        max_in_flight=8,
        observers=[LogEvents()],
    )


class Hook:
    """A receiver under uvicorn, on one port for all its lives."""

    def __init__(self, app: str, directory: Path, *options: str, **env: str) -> None:
        self.port = free_port()
        self.file = directory / "arrivals"
        self._log = directory / "hook.log"
        self._environment = {_FILE: str(self.file), **env}
        self._line = [
            *command_line("uvicorn", f"tests.acceptance.hook:{app}", *options),
            f"--port={self.port}",
            "--no-access-log",
        ]
        self._lives = 0
        self._process: RunningProcess | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    def start(self) -> None:
        """Start it, and return when it listens."""
        self._lives += 1
        self._process = RunningProcess(self._line, self._log, self._environment)
        self._process.wait_for_log("Uvicorn running on", times=self._lives)

    def kill(self) -> None:
        """End it as a crash does."""
        assert self._process is not None
        self._process.kill()

    def close(self) -> None:
        """Let the recorder refuse everything."""
        closed_sign(self.file).touch()

    def open(self) -> None:
        """Let it take everything again."""
        closed_sign(self.file).unlink()

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def arrivals(self) -> list[tuple[str, str, int]]:
        """Id, key and number of whatever the recorder took."""
        lines = self.file.read_text().splitlines()
        rows = (line.split() for line in lines)
        return [(id, key, int(number)) for id, key, number in rows]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()
