"""The application on both sides of the upgrade: it imports only public names.

    pillarbox consume app:billing      receives from the broker
    pillarbox consume app:audit        reads the outbox
    python app.py                      adds messages until SIGTERM

`app.gate` is closed at first: messages that need it wait, fail, or are dead-lettered.
"""

import os
import signal
import threading
from datetime import timedelta
from itertools import count
from typing import Final

from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session, sessionmaker

from pillarbox import Consumer, DeadLetter, Job, Message, RetryLater, add

_OPEN: Final = text("SELECT opened FROM app.gate")
_EFFECT: Final = text(
    "INSERT INTO app.effect (consumer, topic, key, number, release, checkpoint)"
    " VALUES (:consumer, :topic, :key, :number, :release, :checkpoint)"
)
_URL: Final = os.environ["PILLARBOX_DATABASE_URL"]
_sessions = sessionmaker(
    create_engine(_URL.replace("postgresql:", "postgresql+psycopg:", 1), pool_size=8)
)


def _consumer(name: str) -> Consumer:
    def effect(session: Session, message: Message, checkpoint: int | None) -> None:
        values = {
            "consumer": name,
            "topic": message.topic,
            "key": message.key,
            "number": int(message.payload),
            "release": os.environ["RELEASE"],
            "checkpoint": checkpoint,
        }
        session.execute(_EFFECT, values)

    def handle(session: Session, message: Message) -> None:
        effect(session, message, None)

    def wait(session: Session, message: Message) -> None:
        if not session.scalar(_OPEN):
            raise RetryLater(timedelta(seconds=1), "the gate is closed")
        effect(session, message, None)

    def refuse(session: Session, message: Message) -> None:
        if not session.scalar(_OPEN):
            raise DeadLetter("the gate is closed")
        effect(session, message, None)

    def report(job: Job, message: Message) -> None:
        """Continue from the checkpoint, and end once the gate is open."""
        for page in count((job.checkpoint or 0) + 1):
            if job.cancelled:
                return
            with job.transaction() as session:
                is_open = session.scalar(_OPEN)
            job.save(page)
            if is_open:
                break
            threading.Event().wait(0.5)
        with job.finish() as session:
            effect(session, message, job.checkpoint)

    consumer = Consumer(os.environ["PILLARBOX_BROKER_URL"], _sessions, name=name)
    for topic in ("orders.placed", "orders.scheduled", "orders.deferred"):
        consumer.handles(topic)(handle)
    consumer.handles("orders.waiting")(wait)
    consumer.handles("orders.refused")(refuse)
    consumer.job("orders.reported", lease=timedelta(seconds=5))(report)
    return consumer


def billing() -> Consumer:
    """Make the consumer that receives from the broker."""
    return _consumer("billing")


def audit() -> Consumer:
    """Make the consumer that reads the outbox."""
    return _consumer("audit")


def write() -> None:
    """Add a message of each key in a transaction, again and again."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    while not stop.wait(0.2):
        with _sessions.begin() as session:
            # One writer of the keys at a time, also while two releases run.
            number = session.scalar(
                text("UPDATE app.numbers SET next = next + 1 RETURNING next - 1")
            )
            for key in range(int(os.environ["KEYS"])):
                message = Message(
                    "orders.placed",
                    str(number).encode(),
                    key=f"key-{key}",
                    tenant=f"tenant-{key % 2}",
                    headers={"release": os.environ["RELEASE"]},
                )
                add(session, message)


if __name__ == "__main__":
    write()
