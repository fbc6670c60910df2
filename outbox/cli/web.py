"""`pillarbox web`: serve the page."""

import asyncio
import secrets
import signal
import socket
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from typing_extensions import override

from pillarbox.outbox.cli.command import (
    Broker,
    Codec,
    ConsumerPath,
    Databases,
    broker_url_if_given,
    command,
    database_urls,
    new_app,
)
from pillarbox.outbox.cli.output import write_line
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.observability.endpoints import address_of
from pillarbox.outbox.observability.endpoints import listen as open_socket
from pillarbox.outbox.observability.logging import LogEvents

if TYPE_CHECKING:
    from starlette.applications import Starlette

app = new_app()


@command(
    app,
    epilog="Exit status: 0 stopped by SIGTERM or SIGINT; 2 it could not run.",
)
def web(
    *,
    database: Databases = None,
    listen: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Address to listen on. Put a proxy with TLS in front of any that "
            "others can reach.",
        ),
    ] = "127.0.0.1:8380",
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A line for each viewer: NAME TOKEN, and what else the viewer may do: "
            "act, pause, payloads.",
            show_default="one token, which is printed, to read",
        ),
    ] = None,
    broker: Broker = None,
    codec: Codec = None,
    consumer: ConsumerPath = None,
) -> None:
    """Serve a web page that shows messages and failures, and retries dead letters.

    Each of several databases has its own pages; --broker, --codec and --consumer apply
    to the first one.
    """
    try:
        from pillarbox.outbox.web import Settings, TokenLogin, Viewer, web_app
        from pillarbox.outbox.web.login import read_tokens
    except ImportError as error:
        raise ConfigError(str(error)) from error
    url, *others = database_urls(database)
    token = None
    if tokens is None:
        token = secrets.token_urlsafe(24)
        viewers = {token: Viewer(name="operator")}
    else:
        viewers = read_tokens(tokens)
    made = web_app(
        Settings(
            database=url,
            others=tuple(others),
            broker=broker_url_if_given(broker),
            codec=codec,
            consumer=consumer,
            observers=(LogEvents(),),
        ),
        TokenLogin(viewers),
    )
    asyncio.run(_serve(made, open_socket(listen), token))


async def _serve(made: "Starlette", opened: socket.socket, token: str | None) -> None:
    import uvicorn

    class Server(uvicorn.Server):
        """Exits with status 0 after a signal."""

        @override
        def handle_exit(self, sig: int, frame: object) -> None:
            # uvicorn's own handler would kill the process with the signal, instead of
            # exiting with status 0.
            self.force_exit = self.should_exit and sig == signal.SIGINT
            self.should_exit = True

    server = Server(
        uvicorn.Config(
            made,
            log_config=None,
            access_log=False,
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=5,
        )
    )
    with opened:  # it accepts connections already
        _announce(made, address_of(opened), token)
        await server.serve(sockets=[opened])


def _announce(made: "Starlette", where: str, token: str | None) -> None:
    from pillarbox.outbox.web.events import WebStarted

    address = f"http://{'localhost' if where.startswith(':') else ''}{where}"
    made.state.frame.observers.notify(WebStarted(address=address))
    if token is not None:
        write_line(f"Log in at {address}/login#{token}")
        # In a pipe or a file, the link would otherwise appear only when the server
        # ends.
        sys.stdout.flush()
