"""`make demo`: `pillarbox demo`, on other brokers, servers and in other sizes, too."""

import argparse
import os
import sys

from examples.shop.brokers import NAMES, broker
from pillarbox.inbox.demo.command import ORDERS, run
from pillarbox.inbox.demo.play import PAGE_PORT
from pillarbox.outbox.cli.command import DATABASE_VARIABLE


def main() -> int:
    """Run the demo; return 0 only if every count is right."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--orders", type=int, default=ORDERS, metavar="N")
    parser.add_argument(
        "--broker",
        metavar="URL",
        help="of a broker, or the name of one to start for the demo: "
        f"{', '.join(NAMES)} (default: none, the consumers read the database)",
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
        const=PAGE_PORT,
        help="serve the page of pillarbox, and leave it open on the shop until Ctrl-C"
        f" (default port: {PAGE_PORT}; 0 takes any free one)",
    )
    given = vars(parser.parse_args())
    database, chosen = given.pop("database"), given.pop("broker")
    return run(**given, database=database, broker=lambda url: broker(chosen, url))


if __name__ == "__main__":
    sys.exit(main())
