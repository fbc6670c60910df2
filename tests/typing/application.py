"""An application as users write it. Nothing of it runs: its types are the test."""

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Self, TypedDict, assert_type
from uuid import UUID

import psycopg
from alembic import context
from psycopg_pool import AsyncConnectionPool
from pydantic import BaseModel
from sqlalchemy import Connection, Insert
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncSession,
    async_sessionmaker,
)
from sqlalchemy.orm import Session, sessionmaker

from pillarbox import (
    Acked,
    AsyncJob,
    Consumer,
    DeadLetter,
    Delivery,
    Event,
    Job,
    LeaveOut,
    Message,
    Nacked,
    Publisher,
    RetryLater,
    RetryPolicy,
    SchemaRegistry,
    Source,
    add,
    event,
    guard,
    idempotent,
    insert_statement,
    jsonable,
    record_receipt,
    uuid7,
)
from pillarbox.inbox.source import Abilities
from pillarbox.testing import DeadLettered, Drained, added, drain


@event("orders.placed", version=2)
class OrderPlaced(BaseModel):
    order: int


@event("orders.paid")
@dataclass
class OrderPaid:
    order: int


class OrderShipped(TypedDict):
    order: int


assert_type(OrderPlaced(order=1).order, int)
assert_type(OrderPaid(1), OrderPaid)


def write(session: Session, connection: Connection, raw: psycopg.Connection) -> None:
    message = Message("orders.placed", OrderPlaced(order=1), key="order-1")
    assert_type(message, Message)
    assert_type(message.id, UUID)
    assert_type(message.payload, bytes)
    assert_type(message.key, str | None)
    add(session, message, Message.from_json("orders.placed", '{"order": 1}'))
    add(session, OrderPaid(1), key="order-1")
    add(connection, Message("orders.shipped", OrderShipped(order=1)))
    add(raw, Message("orders.shipped", {"order": 1}, available_at=datetime.now(UTC)))
    assert_type(insert_statement(message), Insert)
    assert_type(uuid7(), UUID)
    assert_type(jsonable(OrderPaid(1)), object)


async def write_in_a_loop(
    session: AsyncSession, connection: AsyncConnection, raw: psycopg.AsyncConnection
) -> None:
    add(session, OrderPlaced(order=1))
    await add(connection, OrderPlaced(order=1))
    await assert_type(add(raw, OrderPlaced(order=1)), Coroutine[Any, Any, None])


async def consume(
    sessions: async_sessionmaker[AsyncSession],
    plain: sessionmaker[Session],
    pool: AsyncConnectionPool[psycopg.AsyncConnection[Any]],
    source: Source,
) -> None:
    consumer = Consumer("redis://broker.example", sessions, name="billing")

    @consumer.handles("orders.placed", version=2, time_limit=timedelta(seconds=5))
    async def bill(session: AsyncSession, order: OrderPlaced) -> int:
        if order.order < 0:
            raise DeadLetter("a negative number")
        raise RetryLater(timedelta(minutes=1))

    @consumer.handles_batch("orders.paid", max_size=500)
    async def book(session: AsyncSession, messages: Sequence[Message]) -> None: ...

    @consumer.job("reports.wanted", lease=timedelta(minutes=5))
    async def report(job: AsyncJob, message: Message) -> None:
        async with job.transaction() as session:
            assert_type(session, AsyncSession)

    both = Consumer(source, (sessions, plain), name="both", retry=RetryPolicy())

    @both.handles("orders.*", permanent=(ValueError,))
    def ship(session: Session, message: Message) -> None: ...

    @both.job("reports.*", lease=timedelta(minutes=5))
    def plain_report(job: Job, message: Message) -> None:
        with job.transaction() as session:
            assert_type(session, Session)

    # A decorated function keeps its type, so that tests can call it.
    assert_type(ship(plain(), Message("orders.placed", b"")), None)
    assert_type(await bill(sessions(), OrderPlaced(order=1)), int)

    on_pool = Consumer(source, pool, name="on_pool")

    @on_pool.handles("orders.*")
    async def count(
        connection: psycopg.AsyncConnection[Any], order: OrderShipped
    ) -> None: ...

    def observe(happened: Event) -> None: ...

    Consumer({"default": source}, sessions, name="observed", observers=[observe])


@idempotent(consumer="billing")
async def guarded(session: AsyncSession, message: Message) -> int:
    return 1


@idempotent(consumer="billing")
def guarded_plain(session: Session, message: Message) -> str:
    return ""


async def receive(session: AsyncSession, plain: Session, message: Message) -> None:
    assert_type(await guarded(session, message), int | None)
    assert_type(guarded_plain(plain, message), str | None)
    assert_type(record_receipt(plain, message.id, "billing"), bool)
    async with guard(session, message.id, consumer="billing") as is_new:
        assert_type(is_new, bool)
    with guard(plain, message.id, consumer="billing") as is_new_too:
        assert_type(is_new_too, bool)


async def examine(
    session: AsyncSession, sessions: sessionmaker[Session], consumer: Consumer
) -> None:
    assert_type(added(session), list[Message])
    assert_type(added(session, "orders.placed"), list[Message])
    assert_type(added(session, OrderPlaced), list[OrderPlaced])
    assert_type(added(session, OrderPaid), list[OrderPaid])
    drained = await drain(consumer, sessions=sessions)
    assert_type(drained, Drained)
    assert_type(drained.topics, list[str])
    assert_type(drained.dead_lettered, list[DeadLettered])


def decode(message: Message, registry: SchemaRegistry) -> None:
    assert_type(message.json(), Any)
    assert_type(message.headers["traceparent"], str)

    @registry.event("orders.cancelled")
    class OrderCancelled(BaseModel):
        order: int

    add(Session(), OrderCancelled(order=1), registry=registry)


class Nowhere:
    """A publisher of one's own."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None: ...

    async def publish(self, batch: Sequence[Message]) -> Sequence[Acked | Nacked]:
        return [Acked() for _ in batch]


class Nothing:
    """A source of one's own."""

    abilities = Abilities()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None: ...

    async def receive(self, *, limit: int) -> Sequence[Delivery]:
        return []


publisher: Publisher = Nowhere()
source: Source = Nothing()


def env_py(connection: Connection) -> None:
    leave_out = LeaveOut(connection)

    def include_name(name: str | None, type_: str, parents: Mapping[Any, Any]) -> bool:
        return leave_out.include_name(name, type_, parents) and name != "legacy"

    context.configure(
        include_name=leave_out.include_name, include_object=leave_out.include_object
    )
    context.configure(include_name=include_name)
