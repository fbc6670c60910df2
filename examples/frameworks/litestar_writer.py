"""Litestar: a route that writes rows and messages, and answers after the commit.

uvicorn examples.frameworks.litestar_writer:app

The session is that of Advanced Alchemy's plugin. Its `before_send_handler="autocommit"`
only logs a commit that fails, at DEBUG, and the client has its 201. A dependency with
`yield` exits before the response, and exception handlers see what it raises.
"""

import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from advanced_alchemy.extensions.litestar import SQLAlchemyAsyncConfig, SQLAlchemyPlugin
from litestar import Litestar, Request, Response, post
from litestar.di import Provide
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from examples.frameworks.shop import Order, is_duplicate
from pillarbox import Message, add, sqlalchemy_url


@dataclass
class NewOrder:
    """What the client sends."""

    reference: str


async def transaction(db_session: AsyncSession) -> AsyncGenerator[AsyncSession, None]:
    """Commit the session's transaction, or roll it back if the route raises."""
    async with db_session.begin():
        yield db_session


def refuse(
    request: Request[Any, Any, Any], error: IntegrityError
) -> Response[dict[str, str]]:
    """Answer a second order of one reference, in the route or at commit."""
    if not is_duplicate(error):
        raise error
    return Response({"detail": "the order already exists"}, status_code=409)


@post("/orders", dependencies={"session": Provide(transaction)})
async def place(data: NewOrder, session: AsyncSession) -> dict[str, str]:
    """Save an order and its message, or neither."""
    session.add(Order(reference=data.reference))
    body = {"reference": data.reference}
    add(session, Message("orders.placed", body, key=data.reference))
    return body


config = SQLAlchemyAsyncConfig(
    connection_string=sqlalchemy_url(os.environ["PILLARBOX_DATABASE_URL"])
)
app = Litestar(
    [place],
    exception_handlers={IntegrityError: refuse},
    plugins=[SQLAlchemyPlugin(config=config)],
)
