"""`pillarbox demo`: the shop on a private server."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from pillarbox.inbox.demo.play import say, show
from pillarbox.outbox.cli.command import FAILED, command, new_app
from pillarbox.outbox.cli.main import INTERRUPTED
from pillarbox.outbox.errors import OutboxError
from pillarbox.outbox.testing.postgres import postgres_server

ORDERS: Final = 3000

app = new_app()


@command(
    app,
    epilog=f"Exit status: 0 every count is right; 1 one is wrong; {FAILED} it could "
    "not run.",
)
def demo() -> int:
    """Run a shop whose processes are killed and whose handlers fail; count everything.

    It starts a PostgreSQL server of its own, which it removes at the end. On a terminal
    it also shows the shop on the page, which stays open until Ctrl-C.
    """
    return run(web=0 if sys.stdout.isatty() else None)


def run(
    *,
    orders: int = ORDERS,
    web: int | None = None,
    database: str | None = None,
    broker: Callable[[str], AbstractContextManager[str]] = nullcontext,
) -> int:
    """Run the demo, and return its exit status.

    Args:
        orders, web: as for `show`.
        database: the URL of a database to use instead of a private server.
        broker: opens the broker, given the database's URL; returns its URL.
    """
    try:
        with (
            postgres_server(database, durable=False) as server,
            broker(server.url) as chosen,
        ):
            return show(server.url, chosen, orders=orders, web=web)
    except OutboxError as error:
        sys.stderr.write(f"demo: {error}\n")
        return FAILED
    except KeyboardInterrupt:
        say("stopped before the end")
        return INTERRUPTED
