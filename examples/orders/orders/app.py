"""The application: it saves an order and its event in one transaction."""

from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Annotated
from uuid import uuid4

from fastapi import Depends, FastAPI
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession

from orders.database import Order, sessions
from orders.events import OrderPlaced
from pillarbox import add

app = FastAPI()


class NewOrder(BaseModel):
    customer: str
    amount: Decimal


async def transaction() -> AsyncIterator[AsyncSession]:
    async with sessions.begin() as session:
        yield session


# Commits before the response is sent.
Transaction = Annotated[AsyncSession, Depends(transaction, scope="function")]


@app.post("/orders", status_code=201)
async def place(new: NewOrder, session: Transaction) -> OrderPlaced:
    order = Order(id=uuid4(), customer=new.customer, amount=new.amount)
    session.add(order)
    placed = OrderPlaced(order_id=order.id, customer=new.customer, amount=new.amount)
    add(session, placed, key=str(order.id))
    return placed
