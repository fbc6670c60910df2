"""A webhook receiver in its own process, which tests can query and kill.

`recorder` appends each request it accepts to a file, one per line. `counting` handles
messages in a database with the endpoint of `pillarbox.inbox.webhook`.
"""

import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, Self

from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from pillarbox.inbox.webhook import Verifier, WebhookApp
from pillarbox.outbox.observability.logging import LogEvents
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from pillarbox.outbox.testing.lifetime import free_port
from tests.acceptance.counter import count
from tests.fixtures.http import SECRET
from tests.fixtures.processes import RunningProcess, command_line

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_FILE = "PILLARBOX_TEST_ARRIVALS"


async def recorder(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    """Write the id, key and number of a message to the file, then answer."""
    body, more = b"", True
    while more:
        event = await receive()
        body += event.get("body", b"")
        more = event.get("more_body", False)
    arrivals = Path(os.environ[_FILE])
    if closed_file(arrivals).exists():
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


def closed_file(arrivals: Path) -> Path:
    """Return the path of the file whose existence makes the recorder answer 503."""
    return arrivals.with_suffix(".closed")


def counting() -> Any:
    """Create the endpoint; its effects are rows in `counted`."""
    url = os.environ["PILLARBOX_DATABASE_URL"]
    engine = create_async_engine(sqlalchemy_url(url), pool_size=8)
    return WebhookApp(
        {"numbers.*": count},
        async_sessionmaker(engine),
        name="counter",
        secrets=[SECRET],
        max_in_flight=8,
        observers=[LogEvents()],
    )


class Hook:
    """A receiver under uvicorn, which keeps its port across restarts."""

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
        """Start it, and return once it listens."""
        self._lives += 1
        self._process = RunningProcess(self._line, self._log, self._environment)
        self._process.wait_for_log("Uvicorn running on", times=self._lives)

    def kill(self) -> None:
        """Kill it, as a crash would."""
        assert self._process is not None
        self._process.kill()

    def close(self) -> None:
        """Make the recorder refuse all requests."""
        closed_file(self.file).touch()

    def open(self) -> None:
        """Let the recorder accept requests again."""
        closed_file(self.file).unlink()

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def arrivals(self) -> list[tuple[str, str, int]]:
        """Return the id, key and number of all messages the recorder accepted."""
        lines = self.file.read_text().splitlines()
        rows = (line.split() for line in lines)
        return [(id, key, int(number)) for id, key, number in rows]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()
