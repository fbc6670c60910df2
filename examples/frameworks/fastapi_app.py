"""FastAPI: a webhook whose sender may send the same request more than once.

uvicorn examples.frameworks.fastapi_app:app

The ids are the sender's own (evt_…), so receipts are stored in `inbox.foreign_receipt`.
The answer 200 is sent only after the commit. Check the request's signature first, as
`pillarbox.inbox.webhook.Verifier` does for requests of pillarbox's publisher.
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
from pillarbox import ForeignId, guard, sqlalchemy_url

app = FastAPI()
engine = create_async_engine(sqlalchemy_url(os.environ["PILLARBOX_DATABASE_URL"]))
sessions = async_sessionmaker(engine)


class Event(BaseModel):
    """An event, as the sender defines it."""

    id: str
    order_id: int


async def transaction() -> AsyncIterator[AsyncSession]:
    """Return a session; the route must commit it, since a dependency exits too late."""
    async with sessions() as session:
        yield session


@app.post("/events")
async def receive(
    event: Event, session: Annotated[AsyncSession, Depends(transaction)]
) -> dict[str, bool]:
    """Bill the order of a new event."""
    id = ForeignId("payments", event.id)
    async with session.begin(), guard(session, id, consumer="billing") as is_new:
        if is_new:
            await session.execute(invoice(event.order_id))
    return {"handled": is_new}
