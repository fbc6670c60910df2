"""Mistakes that both type checkers find: an `ignore` that nothing needs is an error."""

from collections.abc import Sequence

import psycopg
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session

from pillarbox import Acked, Consumer, Message, Publisher, add, event, guard
from pillarbox.testing import added


@event("orders.placed")
class OrderPlaced: ...


async def write(session: AsyncSession, raw: psycopg.AsyncConnection) -> None:
    event("orders.placed", 2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await add(session, OrderPlaced())  # type: ignore[misc]  # pyright: ignore[reportGeneralTypeIssues]
    add(raw, OrderPlaced())  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    add(session, OrderPlaced(), keys="order-1")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    Message(1, {})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Message("orders.placed", {}).topic = "orders.paid"  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]


async def receive(sessions: async_sessionmaker[AsyncSession], message: Message) -> None:
    Consumer("redis://broker.example", sessions)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    consumer = Consumer("redis://broker.example", sessions, name="billing")
    consumer.handles("orders.placed", time_limit=5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    consumer.handles("orders.placed", max_size=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    consumer.handles_batch("orders.placed")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    consumer.job("orders.placed")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    with guard(sessions(), message.id, consumer="billing"):  # type: ignore[misc]  # pyright: ignore[reportGeneralTypeIssues]
        pass
    async with guard(Session(), message.id, consumer="billing"):  # type: ignore[misc]  # pyright: ignore[reportGeneralTypeIssues]
        pass


def examine(session: Session) -> list[int]:
    return added(session, OrderPlaced)  # type: ignore[arg-type]  # pyright: ignore[reportReturnType]


class Incomplete:
    async def publish(self, batch: Sequence[Message]) -> Sequence[Acked]:
        return []


publisher: Publisher = Incomplete()  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
