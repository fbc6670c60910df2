"""The source: replicas lease deliveries, and renew the leases periodically."""

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Self
from uuid import uuid4

from pillarbox import Message, uuid7
from pillarbox.inbox.poison.history import FIRST_DELIVERY, REDELIVERED
from pillarbox.inbox.source import Abilities, Delivery
from pillarbox.outbox.cloudevents.headers import from_headers
from pillarbox.outbox.errors import BrokerUnavailableError, InvalidMessageError

from .publisher import PREFIX
from .queue import Queue

# Not past an earlier message of the key that waits or that another replica leases.
_NEXT = """
SELECT m.seq, m.topic, m.headers, m.payload, coalesce(d.attempts, 0), d.seq IS NOT NULL
  FROM message AS m
  LEFT JOIN delivery AS d ON d.consumer = :consumer AND d.seq = m.seq
 WHERE m.topic IN (SELECT value FROM json_each(:topics))
   AND coalesce(d.acked, 0) = 0
   AND coalesce(d.not_before, 0) <= :now
   AND NOT EXISTS (
        SELECT 1
          FROM message AS e
          JOIN delivery AS b ON b.consumer = :consumer AND b.seq = e.seq
         WHERE e.topic = m.topic AND e.key = m.key AND e.seq < m.seq
           AND b.acked = 0 AND b.not_before > :now AND b.owner IS NOT :owner)
 ORDER BY m.seq
 LIMIT :limit
"""
_HOLD = """
INSERT INTO delivery (consumer, seq, owner, not_before, attempts)
VALUES (:consumer, :seq, :owner, :until, 0)
ON CONFLICT (consumer, seq) DO UPDATE SET owner = :owner, not_before = :until
"""
# Only deliveries whose lease this replica still holds: others can take expired ones.
_OURS = "consumer = :consumer AND owner = :owner AND acked = 0"
_ACK = f"UPDATE delivery SET acked = 1 WHERE seq = :seq AND {_OURS}"
_WAIT = f"""
UPDATE delivery SET owner = NULL, not_before = :until, attempts = attempts + 1
 WHERE seq = :seq AND {_OURS}
"""
_HAND_BACK = f"""
UPDATE delivery SET owner = NULL, not_before = :until WHERE seq = :seq AND {_OURS}
"""
_RETURN = (
    f"UPDATE delivery SET owner = NULL, not_before = 0 WHERE seq = :seq AND {_OURS}"
)
_RETURN_ALL = f"UPDATE delivery SET owner = NULL, not_before = 0 WHERE {_OURS}"
_BEAT = f"UPDATE delivery SET not_before = :until WHERE {_OURS}"
_LOOK = 0.02
_BEATS = 3


class AcmeDelivery:
    """One delivery; the source records its outcome."""

    def __init__(self, source: "AcmeSource", row: Sequence[Any]) -> None:
        self._source = source
        self._seq, topic, headers, payload, self.attempts, came_before = row
        self.problem: str | None = None
        self.published_at = None
        self.history = REDELIVERED if came_before else FIRST_DELIVERY
        try:
            self.message = from_headers(json.loads(headers), payload, PREFIX)
        except (InvalidMessageError, ValueError) as error:
            self.problem = str(error)
            self.message = Message(topic, payload, id=uuid7())
        self._settled = False

    async def ack(self) -> None:
        """Ack the delivery."""
        self._settle(_ACK, 0.0)

    async def nack(self, delay: timedelta | None = None) -> None:
        """Nack the delivery; without a delay, it returns to the queue at once."""
        if delay is None:
            self._settle(_RETURN, 0.0)
        else:
            self._settle(_WAIT, time.time() + delay.total_seconds())

    async def hand_back(self, delay: timedelta) -> bool:
        """Hand the delivery back; until the delay has passed, nobody gets it."""
        self._settle(_HAND_BACK, time.time() + delay.total_seconds())
        return True

    def _settle(self, statement: str, until: float) -> None:
        if not self._settled:
            self._settled = True
            self._source.settle(statement, {"seq": self._seq, "until": until})


class AcmeSource:
    """The messages of one consumer's topics, which its replicas share."""

    def __init__(
        self,
        url: str,
        *,
        consumer: str,
        topics: Sequence[str],
        hold: timedelta = timedelta(seconds=30),
        poll_interval: timedelta = timedelta(seconds=1),
    ) -> None:
        self.abilities = Abilities()
        self._queue = Queue(url)
        self._names = {"consumer": consumer, "owner": uuid4().hex}
        self._topics = json.dumps(list(topics))
        self._hold = hold.total_seconds()
        self._poll = poll_interval.total_seconds()
        self._outcomes: list[tuple[str, dict[str, Any]]] = []
        self._beating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._queue.create()
        self._beating = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._beating is not None
        self._beating.cancel()
        await asyncio.wait({self._beating})
        # If the file is unavailable, other replicas take over when the leases expire.
        with suppress(BrokerUnavailableError):
            self._write(_RETURN_ALL, {})

    async def receive(self, *, limit: int) -> Sequence[Delivery]:
        """Poll until there are messages or the poll interval has passed."""
        deadline = time.monotonic() + self._poll
        # SQLite blocks the loop: without this, a busy consumer starves other tasks.
        await asyncio.sleep(0)
        while True:
            if rows := self._take(limit):
                return [AcmeDelivery(self, row) for row in rows]
            if time.monotonic() >= deadline:
                return []
            await asyncio.sleep(_LOOK)

    def settle(self, statement: str, values: dict[str, Any]) -> None:
        """Write an outcome now, or with the next write if that fails."""
        with suppress(BrokerUnavailableError):
            self._write(statement, values)

    def _take(self, limit: int) -> list[Any]:
        now = time.time()
        wanted = {**self._names, "topics": self._topics, "now": now, "limit": limit}
        with self._queue.transaction() as connection:
            self._write_waiting(connection)
            rows = connection.execute(_NEXT, wanted).fetchall()
            connection.executemany(
                _HOLD,
                [
                    {**self._names, "seq": row[0], "until": now + self._hold}
                    for row in rows
                ],
            )
        self._outcomes.clear()
        return rows

    def _write(self, statement: str, values: dict[str, Any]) -> None:
        self._outcomes.append((statement, values))
        with self._queue.transaction() as connection:
            self._write_waiting(connection)
        self._outcomes.clear()

    def _write_waiting(self, connection: Any) -> None:
        for statement, values in self._outcomes:
            connection.execute(statement, {**self._names, **values})

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._hold / _BEATS)
            with suppress(BrokerUnavailableError), self._queue.transaction() as writing:
                writing.execute(
                    _BEAT, {**self._names, "until": time.time() + self._hold}
                )
