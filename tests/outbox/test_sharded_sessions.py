"""A session of several databases needs to know the shard of a message."""

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.ext.horizontal_shard import ShardedSession

import pillarbox
from outbox.postgres.connection import sqlalchemy_url
from pillarbox import ConfigError, Message
from tests.fixtures.added import topics


@pytest.fixture
def options(database_url: str) -> Iterator[dict[str, Any]]:
    engine = create_engine(sqlalchemy_url(database_url))
    yield {
        "shards": {"eu": engine},
        "shard_chooser": lambda mapper, instance, clause=None: instance.country,
        "identity_chooser": lambda *_, **__: ["eu"],
        "execute_chooser": lambda _: ["eu"],
    }
    engine.dispose()


def test_a_message_goes_to_the_shard_that_is_named(
    database_url: str, options: dict[str, Any]
) -> None:
    with ShardedSession(**options) as session:
        with pytest.raises(ConfigError, match=r"bind_arguments=\{'shard_id': …\}"):
            pillarbox.add(session, Message("t", b""))
        session.execute(
            pillarbox.insert_statement(Message("t", b"")),
            bind_arguments={"shard_id": "eu"},
        )
        session.commit()

    assert topics(database_url) == ["t"]


async def test_an_async_sharded_session_is_refused_by_name(
    options: dict[str, Any],
) -> None:
    session = AsyncSession(sync_session_class=ShardedSession, **options)

    with pytest.raises(ConfigError, match="is a ShardedSession"):
        pillarbox.add(session, Message("t", b""))
