"""FastAPI: a route that writes its rows and its messages, and answers after the commit.

uvicorn examples.frameworks.fastapi_writer:app

A dependency with `yield` exits after the response is sent: if its commit fails, the
client already has its 201. With `scope="function"` (FastAPI 0.121 or newer) it exits
before that, and exception handlers see what it raises.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

import pillarbox
from examples.frameworks.shop import Order, is_duplicate
from pillarbox import Message, sqlalchemy_url


class NewOrder(BaseModel):
    """What the client sends."""

    reference: str


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Keep the engine for as long as the application runs."""
    engine = create_async_engine(sqlalchemy_url(os.environ["PILLARBOX_DATABASE_URL"]))
    app.state.sessions = async_sessionmaker(engine)
    yield
    await engine.dispose()


async def transaction(request: Request) -> AsyncIterator[AsyncSession]:
    """Return a session, commit its transaction, or roll it back if the route raises."""
    async with request.app.state.sessions.begin() as session:
        yield session


Transaction = Annotated[AsyncSession, Depends(transaction, scope="function")]
app = FastAPI(lifespan=lifespan)


@app.exception_handler(IntegrityError)
async def refuse(request: Request, error: IntegrityError) -> JSONResponse:
    """Answer a second order of one reference, in the route or at commit."""
    if not is_duplicate(error):
        raise error
    return JSONResponse({"detail": "the order already exists"}, 409)


@app.post("/orders", status_code=201)
async def place(order: NewOrder, session: Transaction) -> dict[str, str]:
    """Save an order and its message, or neither."""
    session.add(Order(reference=order.reference))
    body = {"reference": order.reference}
    pillarbox.add(session, Message("orders.placed", body, key=order.reference))
    return body
