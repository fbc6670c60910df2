"""Real payloads through the whole path, from business transaction to handler.

Writer, relay and consumer run side by side, each in its own process, with PostgreSQL as
the broker. The consumer compares every payload byte for byte.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from itertools import cycle, islice
from statistics import median

from sqlalchemy import Engine, Text, create_engine
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

import pillarbox
from benchmarks.conditions import Conditions, show
from benchmarks.drain import draining
from benchmarks.handling import handling
from benchmarks.measure import Answer, Variant, measure
from benchmarks.recorded_webhooks import Webhook, read
from outbox.postgres.connection import sqlalchemy_url


class Base(DeclarativeBase):
    """The tables of an application that follows activity on GitHub."""


class Repository(Base):
    __tablename__ = "bench_repository"

    name: Mapped[str] = mapped_column(Text, primary_key=True)
    owner: Mapped[str | None]
    events: Mapped[int]


class Sender(Base):
    __tablename__ = "bench_sender"

    login: Mapped[str] = mapped_column(Text, primary_key=True)
    events: Mapped[int]


class Happened(Base):
    __tablename__ = "bench_event"

    id: Mapped[int] = mapped_column(primary_key=True)
    event: Mapped[str]
    action: Mapped[str | None]
    repository: Mapped[str | None]
    sender: Mapped[str]


def answers(conditions: Conditions) -> Iterator[Answer]:
    if conditions.webhooks is None:
        print(
            "  skipped: github-webhooks.jsonl.gz is not known; "
            "give its path by --webhooks or in PILLARBOX_WEBHOOKS",
            file=sys.stderr,
        )
        return
    path = conditions.webhooks
    webhooks = read(path)
    transactions = conditions.size(20_000, quick=2_000)
    written = []

    def run() -> float:
        with conditions.migrated_database() as url:
            started = time.monotonic()
            with (
                handling(url, path, transactions) as consumer,
                draining(url, transactions, publisher=url) as relay,
            ):
                started = time.monotonic()
                write(url, islice(cycle(webhooks), transactions))
                written.append(transactions / (time.monotonic() - started))
                relay.wait()
                handled_at = consumer.wait()
        return transactions / (handled_at - started)

    found = measure(
        Variant(label="handled", run=run),
        runs=conditions.runs(1),
        on_run=lambda label, figure: show(label, figure, "/s"),
    )
    yield Answer(
        question=f"webhooks: {transactions:,} real payloads, added to handled",
        figure=found.median,
        unit="/s",
        noise=found.noise,
        detail=(
            f"each byte for byte the same, written at {median(written):,.0f} "
            "transactions/s by one writer on the same machine"
        ),
    )


def write(database_url: str, webhooks: Iterator[Webhook]) -> None:
    engine = create_engine(sqlalchemy_url(database_url))
    try:
        Base.metadata.create_all(engine)
        record_all(engine, webhooks)
    finally:
        engine.dispose()


def record_all(engine: Engine, webhooks: Iterator[Webhook]) -> None:
    sessions = sessionmaker(engine)
    for webhook in webhooks:
        with sessions.begin() as session:
            record(session, webhook)


def record(session: Session, webhook: Webhook) -> None:
    """Do the business transaction: make its changes, and add a message about them."""
    if webhook.repository is not None:
        seen = insert(Repository).values(
            name=webhook.repository, owner=webhook.owner, events=1
        )
        session.execute(
            seen.on_conflict_do_update(
                index_elements=[Repository.name],
                set_={Repository.events: Repository.events + 1},
            )
        )
    session.execute(
        insert(Sender)
        .values(login=webhook.sender, events=1)
        .on_conflict_do_update(
            index_elements=[Sender.login], set_={Sender.events: Sender.events + 1}
        )
    )
    session.add(
        Happened(
            event=webhook.event,
            action=webhook.action,
            repository=webhook.repository,
            sender=webhook.sender,
        )
    )
    pillarbox.add(session, webhook.message)
