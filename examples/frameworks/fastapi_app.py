"""FastAPI: a webhook whose sender repeats what it is not sure of.

uvicorn examples.frameworks.fastapi_app:app

The ids are the sender's own (evt_…), so the receipt is one of `inbox.foreign_receipt`.
A 200 goes out after the commit only. Check the signature of the request first, as
`inbox.webhook.Verifier` does for those of our own publisher.
"""

import os
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Depends, FastAPI
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)

from examples.frameworks.billing import invoice
from inbox import ForeignId, guard
from outbox.postgres.connection import sqlalchemy_url

app = FastAPI()
engine = create_async_engine(sqlalchemy_url(os.environ["PILLARBOX_DATABASE_URL"]))
sessions = async_sessionmaker(engine)


class Event(BaseModel):
    """What the sender calls an event."""

    id: str
    order_id: int


async def transaction() -> AsyncIterator[AsyncSession]:
    """Return a session; the route commits it, for what is done here comes too late."""
    async with sessions() as session:
        yield session


@app.post("/events")
async def receive(
    event: Event, session: Annotated[AsyncSession, Depends(transaction)]
) -> dict[str, bool]:
    """Bill the order of an event that has not been seen yet."""
    id = ForeignId("payments", event.id)
    async with session.begin(), guard(session, id, consumer="billing") as is_new:
        if is_new:
            await session.execute(invoice(event.order_id))
    return {"handled": is_new}
