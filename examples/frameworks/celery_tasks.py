"""Celery: a task that is sent if and only if the transaction commits.

`send(session, bill, 1)` instead of `bill.delay(1)`. A relay in this process hands the
committed tasks to Celery's broker:

python -m examples.frameworks.celery_tasks
"""

import asyncio
import os
from collections.abc import Sequence
from typing import Any, Self

from celery import Celery
from kombu.exceptions import OperationalError
from sqlalchemy.orm import Session

from pillarbox import (
    Acked,
    BrokerUnavailableError,
    Message,
    Nacked,
    Relay,
    add,
)

app = Celery("billing", broker=os.environ["PILLARBOX_BROKER_URL"])


@app.task(name="bill")  # type: ignore[untyped-decorator]
def bill(order_id: int) -> None:
    """Bill an order."""
    print(f"billed {order_id}")


def send(session: Session, task: Any, *arguments: Any, key: str | None = None) -> None:
    """Send a task with the session's transaction."""
    add(session, Message(f"celery.{task.name}", arguments, key=key))


class CeleryPublisher:
    """Publishes messages of the topics `celery.*` as tasks of a Celery application."""

    identity = "celery"

    def __init__(self, app: Celery) -> None:
        self._app = app

    async def __aenter__(self) -> Self:
        """Return the publisher; Celery connects when it sends."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Close Celery's connections."""
        self._app.pool.force_close_all()

    async def publish(self, batch: Sequence[Message]) -> Sequence[Acked | Nacked]:
        """Send each message as a task with the message's id."""
        return [await asyncio.to_thread(self._send, message) for message in batch]

    def _send(self, message: Message) -> Acked | Nacked:
        name = message.topic.removeprefix("celery.")
        if name not in self._app.tasks:
            return Nacked(f"there is no task {name!r}", permanent=True)
        try:
            # Sent again after a crash, it has the same id.
            self._app.send_task(name, message.json(), task_id=str(message.id))
        except OperationalError as error:
            raise BrokerUnavailableError(f"Celery's broker: {error}") from error
        return Acked()


if __name__ == "__main__":
    asyncio.run(Relay(os.environ["PILLARBOX_DATABASE_URL"], CeleryPublisher(app)).run())
