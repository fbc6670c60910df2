"""Pillarbox's web page, showing the shop."""

import re
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from inbox.demo import outage
from inbox.demo.orders import Shop
from inbox.demo.processes import Processes
from inbox.demo.stage import Stage, say
from outbox.errors import OutboxError

PORT: Final = 8380

_PAUSE: Final = 0.05
_OUTAGE_SECONDS: Final = 30.0
_ADDRESS: Final = re.compile(r"http://[\d.]+:\d+")


def start(processes: Processes, port: int, *, retries: bool) -> None:
    """Serve the page, and print its address.

    Args:
        retries: whether the page can call the handlers of billing.

    Raises:
        OutboxError: the page can't be served; the message says why.
    """
    token = secrets.token_hex(16)
    tokens = processes.write("tokens", f"you {token} act payloads\n")
    consumer = ("--consumer", "inbox.demo.consumers:billing") if retries else ()
    options = ("--listen", f"127.0.0.1:{port}", "--tokens", str(tokens), *consumer)
    processes.start("web", "pillarbox", "web", *options)
    processes.wait_for("web", "WebStarted")
    found = _ADDRESS.search(processes.log("web"))
    if found is None:
        raise OutboxError(processes.log("web").strip())
    say(f"page       {found[0]}/login#{token}")


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
