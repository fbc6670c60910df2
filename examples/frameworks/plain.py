"""No framework: your own loop around a decorated handler.

python -m examples.frameworks.plain

The loop owns the transaction and commits it before the ack. If it fails between the
two, the entry is redelivered and skipped.
"""

import json
import os
from typing import Any, Final
from uuid import UUID

from redis import Redis
from sqlalchemy import create_engine
from sqlalchemy.orm import Session, sessionmaker

from examples.frameworks.billing import invoice
from pillarbox import idempotent, sqlalchemy_url

STREAM: Final = "orders.placed"
GROUP: Final = "billing"


def id_of(entry: dict[str, str]) -> UUID:
    """Read the id that identifies an entry when it is redelivered."""
    return UUID(entry["ce_id"])


@idempotent(consumer="billing", key=id_of)
def bill(session: Session, entry: dict[str, str]) -> None:
    """Bill an order once, however often its entry is delivered."""
    session.execute(invoice(json.loads(entry["ce_data"])["order_id"]))


def consume(redis: Redis, sessions: sessionmaker[Session]) -> None:
    """Bill the orders of a stream, forever."""
    # First this replica's pending entries, from 0 on; then new ones.
    after = "0"
    while True:
        answer: Any = redis.xreadgroup(GROUP, "one", {STREAM: after}, 1, block=1000)
        entries = answer[0][1] if answer else []
        for at, entry in entries:
            with sessions.begin() as session:
                bill(session, entry)
            redis.xack(STREAM, GROUP, at)
        if not entries:
            after = ">"


if __name__ == "__main__":
    consume(
        Redis.from_url(os.environ["PILLARBOX_BROKER_URL"], decode_responses=True),
        sessionmaker(
            create_engine(sqlalchemy_url(os.environ["PILLARBOX_DATABASE_URL"]))
        ),
    )
