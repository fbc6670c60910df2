"""Place orders, wait until billing and shipping have handled them, and count.

This runs only the shop; the relay and the consumers must already be running, as in
docker/compose.yaml: `python -m examples.shop.sales --orders 500`.
"""

import argparse
import sys
import threading
import time
from typing import Final

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import sessionmaker

from pillarbox import sqlalchemy_url, uuid7
from pillarbox.inbox.demo import tally
from pillarbox.inbox.demo.model import Base, Handled, Order
from pillarbox.inbox.demo.orders import Shop
from pillarbox.outbox.cli.command import DATABASE_VARIABLE, url_of

_TICK: Final = 0.5


def main() -> int:
    """Place orders; return 0 only if every count is right."""
    parser = argparse.ArgumentParser(prog="sales", description=__doc__)
    parser.add_argument("--orders", type=int, default=500, metavar="N")
    parser.add_argument("--customers", type=int, default=20, metavar="N")
    parser.add_argument(
        "--patience",
        type=float,
        default=120,
        metavar="SECONDS",
        help="maximum time without progress (default: %(default)g)",
    )
    arguments = parser.parse_args()
    engine = create_engine(sqlalchemy_url(url_of(None, "database", DATABASE_VARIABLE)))
    with engine.begin() as connection:
        Base.metadata.create_all(connection)
        for table in (Order, Handled):
            connection.execute(text(f"TRUNCATE {table.__table__} RESTART IDENTITY"))
    tenant = f"sales-{uuid7()}"
    shop = Shop(sessionmaker(engine), tenant=tenant, customers=arguments.customers)
    shop.run(arguments.orders, threading.Event())
    print(f"{shop.committed} orders committed, {shop.rolled_back} rolled back")
    progress = wait(engine, tenant, arguments.patience)
    print(f"{progress.billing} handled by billing, {progress.shipping} by shipping")
    faults = tally.faults(engine, tenant)
    for name, count in faults.items():
        print(f"{count} {name}")
    good = progress.finished and not any(faults.values())
    print("everything holds" if good else "SOMETHING IS WRONG")
    return 0 if good else 1


def wait(engine: Engine, tenant: str, patience: float) -> tally.Progress:
    """Wait until everything is handled, or until progress stops."""
    seen = None
    moved = time.monotonic()
    while not (now := tally.progress(engine, tenant, relayed=False)).finished:
        if now != seen:
            seen, moved = now, time.monotonic()
        if time.monotonic() - moved > patience:
            break
        time.sleep(_TICK)
    return now


if __name__ == "__main__":
    sys.exit(main())
