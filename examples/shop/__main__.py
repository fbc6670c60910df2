"""`make demo`: place, publish and handle orders despite failures, and count them."""

import argparse
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import sessionmaker

from examples.shop import outage, page, tally
from examples.shop.brokers import NAMES, Broker, broker
from examples.shop.model import Base
from examples.shop.orders import Shop
from examples.shop.partitions import show_partitions
from examples.shop.processes import Processes
from examples.shop.stage import Stage, say, verdict
from examples.shop.topics import CONSUMERS
from outbox import uuid7
from outbox.administration.migrate import migrate
from outbox.cli.command import DATABASE_VARIABLE
from outbox.errors import OutboxError
from outbox.postgres.connection import sqlalchemy_url
from outbox.testing.postgres import postgres_server
from outbox.url import without_password

RELAY: Final = ("pillarbox", "relay", "--lease", "3s")
SKIPPED: Final = "DuplicateSkipped"


def main() -> int:
    """Run the demo; return 0 only if every count is right."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--orders", type=int, default=3000, metavar="N")
    parser.add_argument("--customers", type=int, default=50, metavar="N")
    parser.add_argument("--duplicates", type=int, default=500, metavar="N")
    parser.add_argument(
        "--broker",
        metavar="URL",
        help="of a broker, or the name of one to start for the demo: "
        f"{', '.join(NAMES)} (default: PostgreSQL is the broker, too)",
    )
    parser.add_argument(
        "--database",
        metavar="URL",
        default=os.environ.get(DATABASE_VARIABLE),
        help="use this database instead of a private server"
        f" (default: ${DATABASE_VARIABLE})",
    )
    parser.add_argument(
        "--web",
        metavar="PORT",
        type=int,
        nargs="?",
        const=page.PORT,
        help="serve the page of pillarbox, and leave it open on the shop until Ctrl-C"
        f" (default port: {page.PORT}; 0 takes any free one)",
    )
    arguments = parser.parse_args()
    try:
        with (
            postgres_server(arguments.database, durable=False) as server,
            broker(arguments.broker, server.url) as chosen,
        ):
            return show(server.url, chosen, arguments)
    except OutboxError as error:
        sys.stderr.write(f"demo: {error}\n")
        return 2
    except KeyboardInterrupt:
        say("stopped before the end")
        return 130


def show(url: str, chosen: Broker, arguments: argparse.Namespace) -> int:
    """Set up the database and the broker, run the demo, and count."""
    engine = create_engine(sqlalchemy_url(url))
    cron = has_cron(engine)
    say(f"database   {without_password(url)}")
    say(f"broker     {without_password(chosen.url)}")
    migrate(url, with_cron=cron)
    say(
        "schema     migrated: outbox, inbox, daily partitions by pg_partman"
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
            if arguments.web is not None:
                page.start(pages, arguments.web, retries=chosen.port is None)
            return play(Stage(engine, processes, tenant), chosen, logs, arguments)
        finally:
            processes.stop_all()
            pages.stop_all()
            engine.dispose()


def has_cron(engine: Engine) -> bool:
    """Return whether pg_cron runs in this database."""
    with engine.connect() as connection:
        return bool(
            connection.execute(
                text(
                    "SELECT current_setting('cron.database_name', true)"
                    " = current_database()"
                )
            ).scalar()
        )


def play(
    stage: Stage, chosen: Broker, logs: Path, arguments: argparse.Namespace
) -> int:
    """Place orders while processes fail and die, then count."""
    processes, orders = stage.processes, arguments.orders
    listeners = start_listeners(processes, chosen)
    pid = processes.start("relay-1", *RELAY)
    say(f"started    relay-1  (pid {pid})")
    say()
    fails = chosen.port is None
    shop = Shop(
        sessionmaker(stage.engine), tenant=stage.tenant, customers=arguments.customers
    )
    with taking_orders(shop, orders) as over:
        if fails:
            stage.watch(lambda p: p.committed > orders // 5)
            outage.begin(
                stage, max(1, arguments.customers // 10), of=arguments.customers
            )
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
    expected = replay(stage, listeners, chosen, arguments.duplicates)
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
    if arguments.web is not None:
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
    if chosen.port is not None:
        pid = processes.start(
            "shop", "uvicorn.main", "examples.shop.hook:app", f"--port={chosen.port}"
        )
        processes.wait_for("shop", "Uvicorn running")
        say(f"started    shop     (pid {pid}): billing and shipping behind an endpoint")
        return ["shop"]
    for name in CONSUMERS:
        pid = processes.start(
            name,
            "pillarbox",
            *("--log-level", "debug", "consume", f"examples.shop.consumers:{name}"),
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


if __name__ == "__main__":
    sys.exit(main())
