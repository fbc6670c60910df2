"""A writer with the usual dependency, which commits after the response."""

from typing import Annotated

from fastapi import Depends, FastAPI
from sqlalchemy.ext.asyncio import AsyncSession

from examples.frameworks.fastapi_writer import NewOrder, lifespan, place, transaction

app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=201)
async def place_late(
    order: NewOrder, session: Annotated[AsyncSession, Depends(transaction)]
) -> dict[str, str]:
    return await place(order, session)
