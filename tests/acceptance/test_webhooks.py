"""Real payloads from end to end: application, outbox, relay, broker, consumer."""

import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session

from pillarbox.outbox.postgres.connection import sqlalchemy_url
from tests.acceptance.github import Base, Content, Webhook, read, record
from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import as_role
from tests.fixtures.processes import ROOT, Processes, command_line
from tests.fixtures.readers import add_consumer
from tests.fixtures.waiting import wait_for

FILE = "github-webhooks.jsonl.gz"
WRITERS = 4
ROLLED_BACK = 50

GRANTS = """
    GRANT SELECT, INSERT, UPDATE ON repository TO pillarbox_application;
    GRANT SELECT, INSERT ON received TO pillarbox_consumer;
"""
RECEIVED = """
    SELECT message_id, topic, key, digest, number
      FROM received
     ORDER BY position
"""


@pytest.fixture(scope="session")
def webhooks() -> Sequence[Webhook]:
    given = os.environ.get("PILLARBOX_WEBHOOKS")
    path = Path(given) if given else ROOT.parent / "shared" / "data" / FILE
    if not given and not path.exists():
        pytest.skip(
            f"no {FILE}: name it by PILLARBOX_WEBHOOKS, or put it into shared/data "
            "beside the repository"
        )
    return read(path)


@pytest.fixture
def application(database_url: str, inspection: Inspection) -> Iterator[Engine]:
    """Yield the application's engine, with the privileges of an application."""
    engine = create_engine(sqlalchemy_url(database_url))
    Base.metadata.create_all(engine)
    engine.dispose()
    inspection.run(GRANTS)
    add_consumer(database_url, "github", "github.*", role="pillarbox_consumer")
    engine = create_engine(
        sqlalchemy_url(as_role(database_url, "pillarbox_application")),
        pool_size=WRITERS,
    )
    yield engine
    engine.dispose()


@pytest.fixture
def consumer(database_url: str, application: Engine, tmp_path: Path) -> Iterator[None]:
    url = {
        "PILLARBOX_DATABASE_URL": as_role(database_url, "pillarbox_consumer"),
        "PILLARBOX_BROKER_URL": as_role(database_url, "pillarbox_relay"),
    }
    with Processes(tmp_path, "consumer", **url) as started:
        line = command_line("pillarbox", "consume", "tests.acceptance.github:consumer")
        started.begin(line)
        yield


def write_all(
    application: Engine, webhooks: Sequence[Webhook], transactions: int
) -> dict[UUID, Content]:
    """Commit each webhook in its own transaction, and return the messages added.

    Some transactions are rolled back just before their commit.
    """
    work = zip(range(transactions), cycle(webhooks), strict=False)
    turn = threading.Lock()
    added: dict[UUID, Content] = {}

    def write() -> None:
        while True:
            with turn:
                position, webhook = next(work, (transactions, None))
            if webhook is None:
                return
            with Session(application) as session:
                id, message = record(session, webhook)
                session.flush()
                if position % ROLLED_BACK:
                    session.commit()
                    added[id] = message
                else:
                    session.rollback()

    with ThreadPoolExecutor(WRITERS) as threads:
        for done in [threads.submit(write) for _ in range(WRITERS)]:
            done.result()
    return added


@pytest.mark.timeout(1800)
@pytest.mark.fault
def test_every_payload_arrives_byte_for_byte_and_in_the_order_of_its_repository(
    webhooks: Sequence[Webhook],
    application: Engine,
    consumer: None,
    inspection: Inspection,
    full: bool,
) -> None:
    transactions = 20_000 if full else 300
    added = write_all(application, webhooks, transactions)
    assert len(added) == transactions - transactions // ROLLED_BACK

    wait_for(
        "all is received",
        lambda: inspection.count("received") == len(added),
        seconds=600,
        pause=0.1,
    )
    rows = inspection.rows(RECEIVED)
    assert {id: Content(*message) for id, *message in rows} == added
    numbers: dict[str, list[int]] = defaultdict(list)
    for _, _, key, _, number in rows:
        if key is not None:
            numbers[key].append(number)
    assert all(found == list(range(1, len(found) + 1)) for found in numbers.values())
    assert len({message.topic for message in added.values()}) > 50
