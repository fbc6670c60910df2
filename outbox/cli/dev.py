"""`pillarbox dev`: everything that an application needs while it is developed."""

import asyncio
import logging
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final, NoReturn

import psycopg
import typer

from pillarbox.outbox.cli.command import (
    BROKER_VARIABLE,
    DATABASE_VARIABLE,
    FAILED,
    command,
    new_app,
)
from pillarbox.outbox.cli.output import write_line
from pillarbox.outbox.cli.supervisor import run_coroutine
from pillarbox.outbox.dev.extensions import find_extensions
from pillarbox.outbox.dev.parts import Part, Parts, say
from pillarbox.outbox.dev.project import Project
from pillarbox.outbox.dev.server import Server, choose_server
from pillarbox.outbox.errors import ConfigError, DatabaseUnavailableError, OutboxError
from pillarbox.outbox.gather import gather
from pillarbox.outbox.observability.endpoints import INHERITED, address_of
from pillarbox.outbox.postgres.connection import conninfo
from pillarbox.outbox.url import without_password

_TICK: Final = 0.1
_PAGE_PORT: Final = 8380
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
            help="A Consumer to run as well; it restarts when a Python file changes.",
            show_default=False,
        ),
    ] = None,
    *,
    database: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Migrate and use this database instead of starting PostgreSQL.",
            show_default="its own PostgreSQL",
        ),
    ] = None,
    broker: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Run a relay that publishes to this broker, and consume from it.",
            show_default="none; the consumer reads the database",
        ),
    ] = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="Begin with an empty database.")
    ] = False,
) -> None:
    """Run PostgreSQL, the page and your Consumer while you develop."""
    if consumer is not None and find_spec("watchfiles") is None:
        raise ConfigError(
            "watchfiles is not installed; run pip install 'pillarbox[dev]'"
        )
    if reset and database is not None:
        raise ConfigError(
            "--reset empties the database that pillarbox dev starts itself; omit "
            "--database to use that one, or empty yours yourself"
        )
    project = Project(Path.cwd())
    with project.locked():
        if reset:
            project.erase()
        server = None
        if database is None:
            server = choose_server(project)
            server.create()
        url = database or project.url
        run_coroutine(_run(project, server, url, broker, consumer))


async def _run(
    project: Project,
    server: Server | None,
    url: str,
    broker: str | None,
    consumer: str | None,
) -> None:
    """Start the parts, and run until one of them ends, or a signal arrives.

    Raises:
        OutboxError: a part ended.
    """
    loop, running = asyncio.get_running_loop(), asyncio.current_task()
    assert running is not None

    def stop() -> None:
        # Once: a second signal would cancel the cleanup.
        if not running.cancelling():
            running.cancel()

    for number in _STOPS:
        loop.add_signal_handler(number, stop)
    environment = {DATABASE_VARIABLE: url, BROKER_VARIABLE: broker or url}
    with suppress(asyncio.CancelledError), _listen() as page:
        async with Parts(environment, sockets=[page]) as parts:
            started = []
            if server is not None:
                say("dev", f"starting {server.name}")
                postgres = await parts.start(
                    "postgres", *server.command(), stop=signal.SIGINT, **server.process
                )
                await _wait_for(postgres, url)
                started.append(postgres)
            await _migrate(parts, url)
            is_own = server is not None
            more, reloaded = await _start(
                parts, project, page, url, broker, consumer, is_own=is_own
            )
            ends = [_raise_end(part) for part in [*started, *more]]
            if reloaded:
                ends.append(_reload(parts, reloaded, project.root))
            await gather(ends)
    say("dev", "stopped")


async def _migrate(parts: Parts, url: str) -> None:
    try:
        partman, cron = await asyncio.to_thread(find_extensions, url)
    except psycopg.OperationalError as error:
        raise DatabaseUnavailableError(
            f"database {without_password(url)}: {error}; start it, or omit --database"
        ) from None
    await parts.run(
        "migrate",
        *([] if partman else ["--without-partman"]),
        *([] if cron else ["--without-cron"]),
    )


async def _start(
    parts: Parts,
    project: Project,
    page: socket.socket,
    url: str,
    broker: str | None,
    consumer: str | None,
    *,
    is_own: bool,
) -> tuple[list[Part], Mapping[str, Sequence[str]]]:
    """Show the addresses; start the page, and a relay to the broker.

    Returns what it started, and the commands to reload: they import the consumer.
    """
    lines = [f"page      http://{address_of(page)}/login#{project.token}"]
    if broker is not None:
        lines.insert(0, f"broker    {without_password(broker)}")
    if is_own:
        # With the password, which nobody else knows.
        lines.insert(0, f"database  export {DATABASE_VARIABLE}={url}")
        lines.append(f"data      {project.folder} (empty it with --reset)")
    else:
        lines.insert(0, f"database  {without_password(url)}")
    # It accepts connections although the page restarts.
    inherited = f"{INHERITED}{page.fileno()}"
    web = ["web", "--listen", inherited, "--tokens", str(project.tokens)]
    if consumer is not None:
        lines.append(f"consumer  {consumer}, reloaded when a file changes")
        web += ["--consumer", consumer]
    write_line("", *(f"  {line}" for line in lines), "")
    if is_own:
        # The last run may have been longer ago than the upkeep accepts.
        await parts.pillarbox("maintain", "maintain", "--accept-clock")
    started = []
    if broker is not None:
        # Nobody else's relays publish what is in its own database.
        switch = ["--switch-broker"] if is_own else []
        started.append(await parts.pillarbox("relay", "relay", *switch))
    if consumer is not None:
        return started, {"consumer": ["consume", consumer], "web": web}
    return [*started, await parts.pillarbox("web", *web)], {}


async def _raise_end(part: Part) -> NoReturn:
    await asyncio.wait([part.ended])
    raise _ended(part)


async def _reload(
    parts: Parts, commands: Mapping[str, Sequence[str]], root: Path
) -> NoReturn:
    """Run commands, and again when a Python file below a folder changes."""
    from watchfiles import PythonFilter, awatch

    logging.getLogger("watchfiles").setLevel(logging.WARNING)
    changes = awatch(root, watch_filter=PythonFilter())
    while True:
        running = [await parts.pillarbox(it, *commands[it]) for it in commands]
        changed = {Path(path).name for _, path in await anext(changes)}
        say("dev", f"{', '.join(sorted(changed))} changed")
        await gather(part.stop() for part in running)


async def _wait_for(database: Part, url: str) -> None:
    """Return when the server accepts connections."""
    while not database.ended.done():
        try:
            connection = await psycopg.AsyncConnection.connect(conninfo(url))
        except psycopg.OperationalError:
            await asyncio.wait([database.ended], timeout=_TICK)
        else:
            await connection.close()
            return
    raise _ended(database)


def _listen() -> socket.socket:
    """Listen on the page's usual port, or on a free one if that is in use."""
    try:
        return socket.create_server(("127.0.0.1", _PAGE_PORT))
    except OSError:
        return socket.create_server(("127.0.0.1", 0))


def _ended(part: Part) -> OutboxError:
    return OutboxError(
        f"{part.name} ended with {part.ended.result()}: its last lines above say why"
    )
