"""`pillarbox dev`: everything that an application needs while it is developed."""

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final

import psycopg
import typer

from outbox.cli.command import (
    BROKER_VARIABLE,
    DATABASE_VARIABLE,
    FAILED,
    command,
    new_app,
)
from outbox.cli.output import write_line
from outbox.cli.supervisor import run_coroutine
from outbox.dev.extensions import find_extensions
from outbox.dev.page import open_page
from outbox.dev.parts import Part, Parts, say
from outbox.dev.project import Project
from outbox.dev.server import Server, choose_server, erase
from outbox.errors import ConfigError, OutboxError
from outbox.gather import end
from outbox.observability.endpoints import address_of
from outbox.postgres.connection import conninfo

_FIRST_TICK: Final = 0.05
_LONGEST_TICK: Final = 2.0
_STOPS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

app = new_app()


@command(
    app,
    epilog=f"Exit status: 0 stopped by Ctrl-C; {FAILED} it could not run, or a part of "
    "it ended.",
)
def dev(
    consumer: Annotated[
        str | None,
        typer.Argument(
            metavar="MODULE:NAME",
            help="A Consumer to run, too; it starts again when a Python file changes.",
            show_default=False,
        ),
    ] = None,
    *,
    reset: Annotated[
        bool, typer.Option("--reset", help="Begin with an empty database.")
    ] = False,
) -> None:
    """Run PostgreSQL, a relay, the page and your Consumer while you develop."""
    if consumer is not None and find_spec("watchfiles") is None:
        raise ConfigError(
            "watchfiles is not installed; run pip install 'pillarbox[dev]'"
        )
    project = Project(Path.cwd())
    with project.locked():
        if reset:
            erase(project)
        server = choose_server(project)
        server.create()
        run_coroutine(_run(project, server, consumer))


async def _run(project: Project, server: Server, consumer: str | None) -> None:
    parts = Parts({DATABASE_VARIABLE: project.url, BROKER_VARIABLE: project.url})
    loop = asyncio.get_running_loop()
    running = asyncio.current_task()
    assert running is not None

    def stop() -> None:
        if not running.cancelling():
            running.cancel()
        else:
            parts.kill()

    for number in _STOPS:
        loop.add_signal_handler(number, stop)
    try:
        with open_page() as page:
            async with parts:
                await _Dev(parts, project, consumer, page).run(server)
    except asyncio.CancelledError:
        say("dev", "stopped")


class _Dev:
    """The parts in the order in which they start, and what follows when one ends.

    Args:
        page: the socket on which the page listens.
    """

    def __init__(
        self,
        parts: Parts,
        project: Project,
        consumer: str | None,
        page: socket.socket,
    ) -> None:
        self._parts = parts
        self._project = project
        self._consumer = consumer
        self._page = page

    async def run(self, server: Server) -> None:
        """Start everything, and run until a part ends.

        Raises:
            OutboxError: a part ended.
        """
        parts = self._parts
        say("dev", f"starting {server.name}")
        database = await parts.start(
            "postgres", *server.command(), stop=signal.SIGINT, **server.process
        )
        await self._wait_for(database)
        partman, cron = await asyncio.to_thread(find_extensions, self._project.url)
        await parts.run(
            "migrate",
            *([] if partman else ["--without-partman"]),
            *([] if cron else ["--without-cron"]),
        )
        self._introduce()
        # The last run may have been longer ago than the upkeep accepts.
        await parts.pillarbox("maintain", "maintain", "--accept-clock")
        relay = await parts.pillarbox("relay", "relay")
        changes = self._changes()
        changed = asyncio.ensure_future(anext(changes))
        await asyncio.sleep(0)  # watches from now on, before the consumer reads files
        try:
            while True:
                own = await self._start_own()
                await self._until_a_change([database, relay, *own], changed)
                say("dev", f"{changed.result()} changed: reloading")
                await asyncio.gather(*(part.stop() for part in own))
                changed = asyncio.ensure_future(anext(changes))
        finally:
            await end([changed])

    async def _wait_for(self, database: Part) -> None:
        """Return when the server accepts connections."""
        url = conninfo(self._project.url)
        tick = _FIRST_TICK
        while not database.ended.done():
            try:
                connection = await psycopg.AsyncConnection.connect(url)
            except psycopg.OperationalError:
                await asyncio.wait([database.ended], timeout=tick)
                # The server logs each attempt, and recovery can take long.
                tick = min(2 * tick, _LONGEST_TICK)
            else:
                await connection.close()
                return
        raise _ended(database)

    def _introduce(self) -> None:
        """Print what a developer needs."""
        lines = [
            f"database  export {DATABASE_VARIABLE}={self._project.url}",
            "broker    the same URL",
            f"page      http://{address_of(self._page)}/login#{self._project.token}",
            f"data      {self._project.folder} (empty it with --reset)",
        ]
        if self._consumer is not None:
            lines.append(f"consumer  {self._consumer}, reloaded when a file changes")
        write_line("", *(f"  {line}" for line in lines), "")

    async def _start_own(self) -> list[Part]:
        """Start the parts that run the application's code."""
        started = []
        page = self._page.fileno()
        options = ["--listen", f"fd:{page}", "--tokens", str(self._project.tokens)]
        if self._consumer is not None:
            started.append(
                await self._parts.pillarbox("consumer", "consume", self._consumer)
            )
            options += ["--consumer", self._consumer]
        web = await self._parts.pillarbox("web", "web", *options, pass_fds=[page])
        return [*started, web]

    async def _changes(self) -> AsyncIterator[str]:
        """Yield the names of files that changed, if the application's code runs."""
        if self._consumer is None:
            await asyncio.Event().wait()
        from watchfiles import PythonFilter, awatch

        # It logs how many files changed; `dev` names them.
        logging.getLogger("watchfiles").setLevel(logging.WARNING)
        root = self._project.root
        async for changes in awatch(root, watch_filter=PythonFilter(), step=100):
            names = {str(Path(path).relative_to(root)) for _, path in changes}
            yield ", ".join(sorted(names))

    async def _until_a_change(
        self, parts: Collection[Part], changed: asyncio.Future[str]
    ) -> None:
        """Wait for a change; a consumer that ended waits for one, too.

        Raises:
            OutboxError: another part ended.
        """
        running: dict[asyncio.Future[Any], Part] = {p.ended: p for p in parts}
        while not changed.done():
            done, _ = await asyncio.wait(
                {changed, *running}, return_when=asyncio.FIRST_COMPLETED
            )
            for part in [running.pop(task) for task in done if task is not changed]:
                if part.name != "consumer":
                    raise _ended(part)
                status = part.ended.result()
                say("dev", f"the consumer ended with {status}: change a file")


def _ended(part: Part) -> OutboxError:
    return OutboxError(
        f"{part.name} ended with {part.ended.result()}: its last lines above say why"
    )
