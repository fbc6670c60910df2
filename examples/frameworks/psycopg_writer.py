"""psycopg, without SQLAlchemy's sessions: rows and messages on one connection.

python -m examples.frameworks.psycopg_writer A-1 A-2
"""

import os
import sys

import psycopg

from pillarbox import Message, add, conninfo


def place(connection: psycopg.Connection, reference: str) -> None:
    """Save an order and its message in the connection's transaction."""
    connection.execute("INSERT INTO purchase (reference) VALUES (%s)", (reference,))
    body = {"reference": reference}
    add(connection, Message("orders.placed", body, key=reference))


if __name__ == "__main__":
    # The block commits at its end, or rolls back if it raises.
    with psycopg.connect(conninfo(os.environ["PILLARBOX_DATABASE_URL"])) as connection:
        for reference in sys.argv[1:]:
            place(connection, reference)
