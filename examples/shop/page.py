"""`make demo ARGS=--web`: pillarbox's web page, showing the shop."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from examples.shop import outage
from examples.shop.orders import Shop
from examples.shop.processes import Processes
from examples.shop.stage import Stage, say
from outbox.errors import OutboxError

PORT: Final = 8380

_PAUSE: Final = 0.05
_OUTAGE_SECONDS: Final = 30.0
_LINK: Final = re.compile(r"Log in at (\S+)")


def start(processes: Processes, port: int, *, retries: bool) -> None:
    """Serve the page, and print its address.

    Args:
        retries: whether the page can call the handlers of billing.

    Raises:
        OutboxError: the page can't be served; the message says why.
    """
    consumer = ("--consumer", "examples.shop.consumers:billing") if retries else ()
    processes.start(
        "web",
        "pillarbox",
        *("web", "--port", str(port), "--allow-actions", "--show-payloads", *consumer),
    )
    processes.wait_for("web", "Log in at")
    found = _LINK.search(processes.log("web"))
    if found is None:
        raise OutboxError(processes.log("web").strip())
    say(f"page       {found[1]}")


def keep_open(stage: Stage, shop: Shop, *, fails: bool) -> None:
    """Keep placing orders until Ctrl-C, so that the page has something to show."""
    try:
        say()
        say("The shop goes on, and the page stays open. Press Ctrl-C to end both.")
        if fails:
            outage.begin(stage, 1, of=len(shop.customers))
        with _ordering(shop) as wait:
            if fails:
                wait(_OUTAGE_SECONDS)
                outage.end(stage)
            wait(None)
    except KeyboardInterrupt:
        say()
        say("stopping")


@contextmanager
def _ordering(shop: Shop) -> Iterator[Callable[[float | None], object]]:
    """Place orders during the block; yield the `join` of their thread."""
    stop = threading.Event()
    thread = threading.Thread(target=shop.run, args=(None, stop, _PAUSE))
    try:
        thread.start()
        yield thread.join
    finally:
        stop.set()
        if thread.ident is not None:
            thread.join()
