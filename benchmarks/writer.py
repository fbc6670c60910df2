"""What a message adds to the time of a transaction in an application's session."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from sqlalchemy import BigInteger, Engine, Text, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

import pillarbox
from benchmarks.conditions import Conditions, show
from benchmarks.measure import Answer, Variant, at_most, measure
from benchmarks.workload import TOPIC, payload
from pillarbox import Message
from pillarbox.outbox.postgres.connection import sqlalchemy_url

WARM_UP = 100
PAYLOADS = [payload(number, 300) for number in range(1_000)]


class Base(DeclarativeBase):
    """The application's own tables."""


class Order(Base):
    """The one row that each transaction writes for itself."""

    __tablename__ = "bench_order"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    customer: Mapped[str] = mapped_column(Text)
    total: Mapped[int]


def answers(conditions: Conditions) -> Iterator[Answer]:
    transactions = conditions.size(250, quick=100)
    with conditions.migrated_database() as url, engine(url) as connected:
        bare = Variant(label="none", run=milliseconds(connected, 0, transactions))
        bounds = {1: 1.35, 10: 1.8}
        variants = {
            messages: Variant(
                label=f"{messages}", run=milliseconds(connected, messages, transactions)
            )
            for messages in bounds
        }
        found = measure(
            bare, *variants.values(), runs=conditions.runs(25), on_run=on_run
        )
    for messages, bound in bounds.items():
        yield Answer(
            question=f"writer: ORM transaction, {messages} messages against none",
            figure=1 / found.ratio(variants[messages].label),
            target=at_most(bound),
            noise=found.noise,
            detail=f"a transaction with so many messages: {found.medians('ms')}",
        )


@contextmanager
def engine(url: str) -> Iterator[Engine]:
    connected = create_engine(sqlalchemy_url(url))
    Base.metadata.create_all(connected)
    try:
        yield connected
    finally:
        connected.dispose()


def milliseconds(
    connected: Engine, messages: int, transactions: int
) -> Callable[[], float]:
    """Run transactions one after the other; measure the mean time of one.

    Runs are short and many, since the speed of the disk and of a shared machine changes
    from second to second.
    """
    sessions = sessionmaker(connected)
    numbers = count(1)
    for _ in range(WARM_UP):
        place_order(sessions, next(numbers), messages)

    def run() -> float:
        started = time.perf_counter()
        for _ in range(transactions):
            place_order(sessions, next(numbers), messages)
        return (time.perf_counter() - started) * 1_000 / transactions

    return run


def place_order(sessions: sessionmaker[Session], number: int, messages: int) -> None:
    body = PAYLOADS[number % len(PAYLOADS)]
    with sessions.begin() as session:
        session.add(Order(customer="someone", total=number))
        for _ in range(messages):
            pillarbox.add(session, Message(TOPIC, body, key=f"order-{number}"))


def on_run(label: str, figure: float) -> None:
    show(label, figure, "ms")
