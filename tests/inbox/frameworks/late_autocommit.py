"""Litestar's writer with the plugin's own autocommit."""

from advanced_alchemy.extensions.litestar import SQLAlchemyAsyncConfig, SQLAlchemyPlugin
from litestar import Litestar, post
from sqlalchemy.ext.asyncio import AsyncSession

from examples.frameworks.litestar_writer import NewOrder, config, place


@post("/orders")
async def place_late(data: NewOrder, db_session: AsyncSession) -> dict[str, str]:
    body: dict[str, str] = await place.fn(data, db_session)
    return body


app = Litestar(
    [place_late],
    plugins=[
        SQLAlchemyPlugin(
            config=SQLAlchemyAsyncConfig(
                connection_string=config.connection_string,
                before_send_handler="autocommit",
            )
        )
    ],
)
