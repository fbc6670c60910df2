"""An application that stores GitHub's webhooks, and a consumer of its messages.

Each webhook is a business transaction: it counts an event of the repository, and adds a
message whose key is the repository. Several writers run at once. The lock on the row of
the repository puts the messages of a key in order.
"""

import gzip
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import UUID

from sqlalchemy import BigInteger, Identity
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import pillarbox
from pillarbox import Consumer
from pillarbox.outbox.message import Message
from pillarbox.outbox.postgres.connection import sqlalchemy_url


class Base(DeclarativeBase):
    pass


class Repository(Base):
    __tablename__ = "repository"
    name: Mapped[str] = mapped_column(primary_key=True)
    events: Mapped[int]


class Received(Base):
    """A message that the consumer received; `number` counts within a repository."""

    __tablename__ = "received"
    position: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    message_id: Mapped[UUID]
    topic: Mapped[str]
    key: Mapped[str | None]
    digest: Mapped[str]
    number: Mapped[int]


@dataclass(frozen=True, slots=True)
class Webhook:
    """One line of the file."""

    kind: str
    repository: str | None
    payload: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Content:
    """The parts of a message to compare, as added and as received."""

    topic: str
    key: str | None
    digest: str
    number: int


def read(path: Path) -> Sequence[Webhook]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        read = map(json.loads, lines)
        return [Webhook(it["event"], it["repository"], it["payload"]) for it in read]


def record(session: Session, webhook: Webhook) -> tuple[UUID, Content]:
    """Record a webhook in the transaction of `session`, and add its message."""
    number = 0
    if webhook.repository is not None:
        repository = insert(Repository).values(name=webhook.repository, events=1)
        upsert = repository.on_conflict_do_update(
            index_elements=["name"], set_={"events": Repository.events + 1}
        )
        number = session.scalars(upsert.returning(Repository.events)).one()
    message = Message(
        f"github.{webhook.kind}",
        webhook.payload,
        key=webhook.repository,
        headers={"number": str(number)},
    )
    pillarbox.add(session, message)
    return message.id, _content_of(message)


def _content_of(message: Message) -> Content:
    digest = sha256(message.payload).hexdigest()
    return Content(message.topic, message.key, digest, int(message.headers["number"]))


async def receive(session: AsyncSession, message: Message) -> None:
    content = _content_of(message)
    session.add(
        Received(
            message_id=message.id,
            topic=content.topic,
            key=content.key,
            digest=content.digest,
            number=content.number,
        )
    )


def consumer() -> Consumer:
    """Create the consumer."""
    url = os.environ["PILLARBOX_DATABASE_URL"]
    sessions = async_sessionmaker(create_async_engine(sqlalchemy_url(url), pool_size=8))
    consumer = Consumer(
        os.environ["PILLARBOX_BROKER_URL"], sessions, name="github", max_in_flight=8
    )
    consumer.handles("github.*")(receive)
    return consumer
