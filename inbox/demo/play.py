"""The demo: place, publish and handle orders despite failures, and count them."""

import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sqlalchemy import create_engine, text
from sqlalchemy.orm import sessionmaker

from inbox.demo import outage, page, tally
from inbox.demo.broker import Broker
from inbox.demo.model import Base
from inbox.demo.orders import CONSUMERS, Shop
from inbox.demo.partitions import show_partitions
from inbox.demo.processes import Processes
from inbox.demo.stage import Stage, say, verdict
from outbox.administration.migrate import migrate
from outbox.dev.extensions import find_extensions
from outbox.postgres.connection import sqlalchemy_url
from outbox.url import without_password
from pillarbox import uuid7

RELAY: Final = ("pillarbox", "relay", "--lease", "3s")
SKIPPED: Final = "DuplicateSkipped"


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The size of the demo.

    Attributes:
        duplicates: how many messages are published a second time.
        web: the port of the page, which stays open until Ctrl-C; 0 for any free one,
            None for no page.
    """

    orders: int = 3000
    customers: int = 50
    duplicates: int = 500
    web: int | None = None


def show(url: str, chosen: Broker, options: Options) -> int:
    """Set up the database, run the demo, and count.

    Returns:
        0 only if every count is right, else 1.
    """
    engine = create_engine(sqlalchemy_url(url))
    partman, cron = find_extensions(url)
    say(f"database   {without_password(url)}")
    say(f"broker     {without_password(chosen.url)}")
    migrate(url, with_cron=cron, partman_schema="partman" if partman else None)
    say(
        "schema     migrated: outbox, inbox, daily partitions by "
        + ("pg_partman" if partman else "pillarbox: there is no pg_partman")
        + (", upkeep by pg_cron" if cron else "; pg_cron does not run in this database")
    )
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA IF EXISTS pillarbox_demo CASCADE"))
        connection.execute(text("CREATE SCHEMA pillarbox_demo"))
        Base.metadata.create_all(connection)
    tenant = f"demo-{uuid7().hex[-8:]}"
    with tempfile.TemporaryDirectory(prefix="pillarbox-demo-") as folder:
        logs = Path(folder)
        processes = Processes(url, chosen, logs, tenant=tenant)
        # Separate from the others, which are stopped before the count.
        pages = Processes(url, chosen, logs, tenant=tenant)
        try:
            if options.web is not None:
                page.start(pages, options.web, retries=chosen.hook is None)
            return play(Stage(engine, processes, tenant), chosen, logs, options)
        finally:
            processes.stop_all()
            pages.stop_all()
            engine.dispose()


def play(stage: Stage, chosen: Broker, logs: Path, options: Options) -> int:
    """Place orders while processes fail and die, then count."""
    processes, orders = stage.processes, options.orders
    listeners = start_listeners(processes, chosen)
    pid = processes.start("relay-1", *RELAY)
    say(f"started    relay-1  (pid {pid})")
    say()
    fails = chosen.hook is None
    shop = Shop(
        sessionmaker(stage.engine), tenant=stage.tenant, customers=options.customers
    )
    with taking_orders(shop, orders) as over:
        if fails:
            stage.watch(lambda p: p.committed > orders // 5)
            outage.begin(stage, max(1, options.customers // 10), of=options.customers)
        else:
            say("  (no consumer fails here: a webhook endpoint has no dead letters)")
        stage.watch(lambda p: p.committed > orders * 2 // 5)
        processes.kill("relay-1")
        say("  ✂ SIGKILL relay-1, with messages in flight")
        pid = processes.start("relay-2", *RELAY)
        say(f"  ↻ started relay-2 (pid {pid})")
        if fails:
            outage.kill_billing(stage, over)
        stage.watch(lambda p: p.published > orders * 3 // 5)
        if fails:
            outage.end(stage)
    stage.watch(lambda p: p.settled)
    if fails:
        outage.repair(stage)
    expected = replay(stage, listeners, chosen, options.duplicates)
    statuses = processes.stop_all()
    say()
    good = report(shop, stage.progress(), tally.faults(stage.engine, stage.tenant))
    if fails:
        good &= outage.report(stage, shop.tally.committed)
    for name in listeners:
        skipped = processes.logged(name, SKIPPED)
        what = f"duplicates that {name} skipped"
        good &= verdict(what, skipped, skipped >= expected[name])
    if not chosen.repeats:
        say("    (this broker deduplicates what is published twice)")
    for name, status in statuses.items():
        # uvicorn shuts down cleanly, but then still ends by the signal.
        in_order = {0, -signal.SIGTERM} if name == "shop" else {0}
        good &= verdict(f"{name} stopped with exit status", status, status in in_order)
    if not good:
        for log in sorted(logs.iterdir()):
            say(f"--- {log.name}")
            say("\n".join(log.read_text().splitlines()[-15:]))
    say()
    show_partitions(stage.engine, say)
    say()
    say("everything holds" if good else "SOMETHING IS WRONG")
    if options.web is not None:
        start_listeners(processes, chosen)
        processes.start("relay-3", *RELAY)
        page.keep_open(stage, shop, fails=fails)
    return 0 if good else 1


def replay(
    stage: Stage, listeners: Sequence[str], chosen: Broker, count: int
) -> Mapping[str, int]:
    """Publish messages a second time; report how many each consumer skipped."""
    processes = stage.processes
    skipped = {name: processes.logged(name, SKIPPED) for name in listeners}
    which = ("--since", "1h", "--tenant", stage.tenant, "--limit", str(count))
    say(f"$ pillarbox replay {' '.join(which)}")
    said = processes.run("pillarbox", "replay", *which)
    say(f"  {said}")
    replayed = int(said.split()[0]) if chosen.repeats else 0
    expected = {name: skipped[name] + replayed for name in listeners}
    stage.watch(
        lambda p: (
            p.finished
            and all(processes.logged(n, SKIPPED) >= expected[n] for n in listeners)
        )
    )
    return expected


def start_listeners(processes: Processes, chosen: Broker) -> Sequence[str]:
    """Start the consumers; return the names of their processes."""
    if chosen.hook is not None:
        options = (chosen.hook, f"--port={chosen.port}")
        pid = processes.start("shop", "uvicorn.main", *options)
        processes.wait_for("shop", "Uvicorn running")
        say(f"started    shop     (pid {pid}): billing and shipping behind an endpoint")
        return ["shop"]
    for name in CONSUMERS:
        pid = processes.start(
            name,
            "pillarbox",
            *("--log-level", "debug", "consume", f"inbox.demo.consumers:{name}"),
        )
        say(f"started    {name:<8} (pid {pid})")
    for name in CONSUMERS:
        # Otherwise a consumer would miss what is published before its first start.
        processes.wait_for(name, "ConsumerStarted")
    return CONSUMERS


@contextmanager
def taking_orders(shop: Shop, orders: int) -> Iterator[Callable[[], bool]]:
    """Run the shop in a thread during the block, and wait for its last order.

    Yields a function that returns whether all orders are placed.
    """
    stop = threading.Event()
    thread = threading.Thread(target=shop.run, args=(orders, stop))
    thread.start()
    try:
        yield lambda: not thread.is_alive()
        thread.join()
    finally:
        stop.set()
        thread.join()


def report(shop: Shop, progress: tally.Progress, faults: dict[str, int]) -> bool:
    """Print every count with its verdict; return whether all are right."""
    committed = shop.tally.committed
    good = verdict("orders committed", committed, committed == progress.committed)
    good &= verdict("orders rolled back on purpose", shop.tally.rolled_back, True)
    for name in ("published", "billing", "shipping"):
        count = getattr(progress, name)
        what = name if name == "published" else f"handled by {name}"
        good &= verdict(what, count, count == committed)
    for name, count in faults.items():
        good &= verdict(name, count, count == 0)
    return good
