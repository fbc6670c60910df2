"""FastAPI: a route that repeats its first answer to an `Idempotency-Key`.

uvicorn examples.frameworks.idempotency_key:app

The answer commits with the rows and the messages: a client that lost it sends the
request again, and gets the same one. Nothing is kept of a request that fails.
"""

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Annotated

from fastapi import FastAPI, Header, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from sqlalchemy import DateTime, delete, func
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from examples.frameworks.fastapi_writer import NewOrder, Transaction, lifespan
from examples.frameworks.shop import Base, Order
from pillarbox import Message, add


class FirstAnswer(Base):
    """The answer to the first request of a client with a key."""

    __tablename__ = "first_answer"

    client: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    request: Mapped[bytes]
    status: Mapped[int]
    body: Mapped[bytes]
    answered_at: Mapped[datetime] = mapped_column(
        DateTime(timezone=True), server_default=func.now(), index=True
    )


async def answer_once(
    session: AsyncSession,
    request: Request,
    client: str,
    key: str,
    answer: Callable[[], Awaitable[Response]],
) -> Response:
    """Return the first answer to a key, or answer now and keep it."""
    lock = func.hashtextextended(f"{client} {key}", 0)
    # Held until the transaction ends: by then the first answer is stored, or gone.
    if not await session.scalar(func.pg_try_advisory_xact_lock(lock)):
        raise HTTPException(409, "a request with this key is running; try again")
    sent = f"{request.method} {request.url.path} ".encode() + await request.body()
    digest = sha256(sent).digest()
    first = await session.get(FirstAnswer, (client, key))
    if first is None:
        response = await answer()
        first = FirstAnswer(
            client=client,
            key=key,
            request=digest,
            status=response.status_code,
            body=bytes(response.body),
        )
        session.add(first)
    elif first.request != digest:
        raise HTTPException(
            422, "another request was sent with this key; use a new one"
        )
    return Response(first.body, first.status, media_type="application/json")


async def forget(session: AsyncSession, age: timedelta = timedelta(days=1)) -> None:
    """Delete old answers: from then on, their keys are new. Run it every hour."""
    is_old = FirstAnswer.answered_at < func.now() - age
    await session.execute(delete(FirstAnswer).where(is_old))


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=201)
async def place(
    order: NewOrder,
    session: Transaction,
    request: Request,
    client: Annotated[str, Header(alias="X-Client", max_length=64)],
    key: Annotated[str, Header(alias="Idempotency-Key", min_length=8, max_length=255)],
) -> Response:
    """Save an order and its message, or repeat the first answer."""

    async def save() -> Response:
        session.add(Order(reference=order.reference))
        body = {"reference": order.reference}
        add(session, Message("orders.placed", body, key=order.reference))
        return JSONResponse(body, 201)

    return await answer_once(session, request, client, key, save)
