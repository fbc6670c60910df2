"""`make demo`: orders are taken, published, handled; processes die; all is counted."""

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import sessionmaker

from examples.shop import tally
from examples.shop.brokers import CONSUMERS, PRIVATE, Broker, broker
from examples.shop.model import Base
from examples.shop.orders import Shop
from examples.shop.partitions import show_partitions
from examples.shop.processes import Processes
from outbox import uuid7
from outbox.command import DATABASE_VARIABLE
from outbox.database import sqlalchemy_url
from outbox.errors import OutboxError
from outbox.migrate import migrate
from outbox.testing.postgres import postgres_server
from outbox.url import without_password

_TICK: Final = 0.5
_PATIENCE: Final = 60.0


def say(line: str = "") -> None:
    """Print a line now."""
    print(line, flush=True)


def main() -> int:
    """Run the show; 0 only if every count is right."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--orders", type=int, default=4000, metavar="N")
    parser.add_argument("--customers", type=int, default=50, metavar="N")
    parser.add_argument("--duplicates", type=int, default=500, metavar="N")
    parser.add_argument(
        "--broker",
        metavar="URL",
        help="of a broker, or the name of one to start for the show: "
        f"{', '.join(PRIVATE)} (default: PostgreSQL is the broker, too)",
    )
    parser.add_argument(
        "--database",
        metavar="URL",
        default=os.environ.get(DATABASE_VARIABLE),
        help="use this database instead of a private server"
        f" (default: ${DATABASE_VARIABLE})",
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


def show(url: str, chosen: Broker, arguments: argparse.Namespace) -> int:
    """Set the stage, play, count."""
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
    tenant = f"demo-{uuid7()}"
    with tempfile.TemporaryDirectory(prefix="pillarbox-demo-") as folder:
        logs = Path(folder)
        processes = Processes(url, chosen, logs)
        try:
            return play(engine, processes, chosen, logs, tenant, arguments)
        finally:
            processes.stop_all()
            engine.dispose()


def has_cron(engine: Engine) -> bool:
    """Tell whether pg_cron works in this very database."""
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
    engine: Engine,
    processes: Processes,
    chosen: Broker,
    logs: Path,
    tenant: str,
    arguments: argparse.Namespace,
) -> int:
    """Let orders come in while processes die, then count."""
    listeners = start_listeners(processes, chosen)
    pid = processes.start("relay-1", "relay.cli", "run", "--lease", "3")
    say(f"started    relay-1  (pid {pid})")
    say()
    shop = Shop(sessionmaker(engine), tenant=tenant, customers=arguments.customers)
    with taking_orders(shop, arguments.orders):
        watch(
            engine, processes, tenant, lambda p: p.committed > arguments.orders * 2 // 5
        )
        processes.kill("relay-1")
        say("  ✂ SIGKILL relay-1: what it had in flight is in nobody's hands")
        pid = processes.start("relay-2", "relay.cli", "run", "--lease", "3")
        say(f"  ↻ started relay-2 (pid {pid})")
        watch(
            engine, processes, tenant, lambda p: p.published > arguments.orders * 3 // 5
        )
        count = tally.publish_again(engine, tenant, arguments.duplicates)
        say(f"  ⧉ {count:,} published messages are published a second time")

    expected = count if chosen.repeats else 0

    def everything_arrived(progress: tally.Progress) -> bool:
        return progress.finished and all(
            processes.logged(name, "DuplicateSkipped") >= expected for name in listeners
        )

    watch(engine, processes, tenant, everything_arrived)
    statuses = processes.stop_all()
    say()
    good = report(shop, tally.progress(engine, tenant), tally.faults(engine, tenant))
    for name in listeners:
        skipped = processes.logged(name, "DuplicateSkipped")
        good &= line(f"duplicates that {name} skipped", skipped, skipped >= expected)
    if not chosen.repeats:
        say("    (this broker keeps what is published twice once)")
    for name, status in statuses.items():
        # uvicorn stops in order, and then ends by the signal after all.
        in_order = {0, -signal.SIGTERM} if name == "shop" else {0}
        good &= line(f"{name} stopped with exit status", status, status in in_order)
    if not good:
        for log in sorted(logs.iterdir()):
            say(f"--- {log.name}")
            say("\n".join(log.read_text().splitlines()[-15:]))
    say()
    show_partitions(engine, say)
    say()
    say("everything holds" if good else "SOMETHING IS WRONG")
    return 0 if good else 1


def start_listeners(processes: Processes, chosen: Broker) -> Sequence[str]:
    """Start what handles the orders; name its processes."""
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
            "inbox.cli",
            *("--log-level", "debug", "run", f"examples.shop.consumers:{name}"),
        )
        say(f"started    {name:<8} (pid {pid})")
    for name in CONSUMERS:
        # Else what is published before a consumer's first start would not be for it.
        processes.wait_for(name, "ConsumerStarted")
    return CONSUMERS


@contextmanager
def taking_orders(shop: Shop, orders: int) -> Iterator[None]:
    """Let the shop take orders beside us, and wait for the last one."""
    stop = threading.Event()
    thread = threading.Thread(target=shop.run, args=(orders, stop))
    thread.start()
    try:
        yield
        thread.join()
    finally:
        stop.set()
        thread.join()


def watch(
    engine: Engine,
    processes: Processes,
    tenant: str,
    reached: Callable[[tally.Progress], bool],
) -> None:
    """Show how far everybody is until a point is reached, or nothing moves any more."""
    seen: tally.Progress | None = None
    moved = time.monotonic()
    while True:
        now = tally.progress(engine, tenant)
        if now != seen:
            seen, moved = now, time.monotonic()
            say(
                f"  committed {now.committed:>6,}   published {now.published:>6,}"
                f"   billing {now.billing:>6,}   shipping {now.shipping:>6,}"
            )
        if reached(now):
            return
        if processes.failed() or time.monotonic() - moved > _PATIENCE:
            say(f"  nothing moves any more; ended: {processes.failed() or 'nobody'}")
            return
        time.sleep(_TICK)


def report(shop: Shop, progress: tally.Progress, faults: dict[str, int]) -> bool:
    """Print every count with its verdict; tell whether all are right."""
    committed = shop.tally.committed
    good = line("orders committed", committed, committed == progress.committed)
    good &= line("orders rolled back on purpose", shop.tally.rolled_back, True)
    for name in ("published", "billing", "shipping"):
        count = getattr(progress, name)
        what = name if name == "published" else f"handled by {name}"
        good &= line(what, count, count == committed)
    for name, count in faults.items():
        good &= line(name, count, count == 0)
    return good


def line(what: str, count: int, right: bool) -> bool:
    """Print one count with its verdict."""
    say(f"  {'✔' if right else '✘'} {what:<45} {count:>7,}")
    return right


if __name__ == "__main__":
    sys.exit(main())
