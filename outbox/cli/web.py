"""`pillarbox web`: serve the page."""

import asyncio
import getpass
import secrets
import signal
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Final

import typer
from typing_extensions import override

from outbox.administration.sides import RetryOptions
from outbox.cli.command import (
    Broker,
    Codec,
    Database,
    Duration,
    command,
    database_url,
    duration_option,
    new_app,
)
from outbox.cli.output import write_line
from outbox.errors import ConfigError
from outbox.import_path import import_object
from outbox.observability.logging import LogEvents

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette

_PORT: Final = 8380
_ACTIONS: Final = "Actions"
_VIEWERS: Final = "Viewers"

app = new_app()


@command(
    app,
    epilog="Exit status: 0 stopped by SIGTERM or SIGINT; 2 it could not run.",
)
def web(
    *,
    database: Database = None,
    host: Annotated[
        str,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            help="Address to listen on. Put a proxy with TLS in front of any that "
            "others can reach.",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            "--port", metavar="N", min=0, max=65535, help="Port; 0 takes any free one."
        ),
    ] = _PORT,
    tokens: Annotated[
        str | None,
        typer.Option(
            "--tokens",
            metavar="FILE",
            help="A line for each viewer: NAME TOKEN, and what else the viewer may do: "
            "act, payloads.",
            show_default="one token, which is printed",
            rich_help_panel=_VIEWERS,
        ),
    ] = None,
    show_payloads: Annotated[
        bool,
        typer.Option(
            "--show-payloads",
            help="Show payloads, headers and stack traces to viewers who may see them.",
            rich_help_panel=_VIEWERS,
        ),
    ] = False,
    redact: Annotated[
        str | None,
        typer.Option(
            "--redact",
            metavar="MODULE:NAME",
            help="A function that takes each of these texts and returns what of it may "
            "be shown.",
            rich_help_panel=_VIEWERS,
        ),
    ] = None,
    allow_actions: Annotated[
        bool,
        typer.Option(
            "--allow-actions",
            help="Let viewers retry and discard dead letters, and cancel jobs.",
            rich_help_panel=_ACTIONS,
        ),
    ] = False,
    broker: Broker = None,
    codec: Codec = None,
    consumer: Annotated[
        str | None,
        typer.Option(
            "--consumer",
            metavar="MODULE:NAME",
            help="Where the Consumer is whose handlers are called for retries.",
            rich_help_panel=_ACTIONS,
        ),
    ] = None,
    refresh: Annotated[
        timedelta,
        duration_option("--refresh", help="How often an open page looks for changes."),
    ] = Duration(seconds=2),
) -> None:
    """Serve a page that shows dead letters, partitions and jobs, and repairs them."""
    try:
        from outbox.web import Settings, TokenLogin, Viewer, web_app
        from outbox.web.login import read_tokens
    except ImportError as error:
        raise ConfigError(str(error)) from error
    url = database_url(database)
    token = None
    if tokens is None:
        token = secrets.token_urlsafe(24)
        viewers = {token: Viewer(name=_login(), may_act=True, sees_payloads=True)}
    else:
        viewers = read_tokens(tokens)
    made = web_app(
        Settings(
            database=url,
            allow_actions=allow_actions,
            show_payloads=show_payloads,
            redact=import_object("redact", redact) if redact else str,
            retry=RetryOptions(
                database=url,
                broker=broker,
                codec=codec,
                consumer=consumer,
                schedule=None,
            ),
            refresh=refresh,
            observers=(LogEvents(),),
        ),
        TokenLogin(viewers),
    )
    asyncio.run(_serve(made, host, port, token, allow_actions=allow_actions))


async def _serve(
    made: "Starlette", host: str, port: int, token: str | None, *, allow_actions: bool
) -> None:
    import uvicorn

    class Server(uvicorn.Server):
        """Ends the streams of open pages, which would keep it from stopping."""

        @override
        def handle_exit(self, sig: int, frame: object) -> None:
            loop.call_soon_threadsafe(made.state.frame.streams.stop)
            # uvicorn's own handler would kill the process with the signal, instead of
            # exiting with status 0.
            self.force_exit = self.should_exit and sig == signal.SIGINT
            self.should_exit = True

        @override
        async def startup(self, sockets: object = None) -> None:
            await super().startup(sockets)  # type: ignore[arg-type]
            if self.started:
                _tell(self, host, token, made, allow_actions=allow_actions)

    loop = asyncio.get_running_loop()
    server = Server(
        uvicorn.Config(
            made,
            host=host,
            port=port,
            log_config=None,
            access_log=False,
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=5,
        )
    )
    try:
        await server.serve()
    except SystemExit as end:
        raise ConfigError(
            f"can't listen on {host} port {port}: another process may be using it; "
            "choose another --port"
        ) from end


def _tell(
    server: "uvicorn.Server",
    host: str,
    token: str | None,
    made: "Starlette",
    *,
    allow_actions: bool,
) -> None:
    from outbox.web.events import WebStarted

    port = server.servers[0].sockets[0].getsockname()[1]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    made.state.frame.observers.notify(
        WebStarted(address=address, actions=allow_actions)
    )
    if token is not None:
        write_line(f"Log in at {address}/login#{token}")
        # In a pipe or a file, the link would otherwise appear only when the server
        # ends.
        sys.stdout.flush()


def _login() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "operator"
