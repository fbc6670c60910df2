"""Pulls from JetStream's durable consumers, over one connection.

This doesn't use nats-py's `PullSubscription.fetch` (as of 2.16), for three reasons:

- If `fetch` is cancelled, the messages it has received are lost until `ack_wait` ends,
  and `receive` can be cancelled.
- It discards the server's status messages about an earlier pull, such as that the
  durable was deleted.
- It needs a subscription and a waiting task for each durable, and a consumer has one
  durable for each topic.
"""

import json
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from nats.aio.msg import Msg

from pillarbox.inbox.poison.history import FIRST_DELIVERY
from pillarbox.inbox.sources.nats.durable import NANOSECONDS, Durable, Entry
from pillarbox.outbox.brokers.nats.connection import NatsConnection
from pillarbox.outbox.brokers.nats.message import decode_message, raw_headers, raw_text
from pillarbox.outbox.brokers.shards import Shard
from pillarbox.outbox.errors import InvalidMessageError
from pillarbox.outbox.logs.printable import count
from pillarbox.outbox.message import Message
from pillarbox.outbox.retry import jittered

ACKS: Final = "$JS.ACK."
_SHORT_ACK: Final = 9
_GRACE: Final = 5.0
_LATE: Final = 0.2
_ALONE: Final = 2.0
# The pull ended with no messages, or fewer than requested.
_ENDED: Final = frozenset({"404", "408"})
_NO_RESPONDERS: Final = "503"


class Pulls:
    """The open pulls on durables, over one connection.

    Args:
        on_gone: called after a durable that was read is gone.
        is_paused: whether a topic is paused: no pull is opened on it.

    Attributes:
        reading: the durables that this replica reads, by their places.
        alone: a subject for the answer that nobody has subscribed to another one.
        is_alone: whether that answer has come.
    """

    def __init__(
        self,
        connection: NatsConnection,
        api: str,
        on_gone: Callable[[], None],
        is_paused: Callable[[str], bool],
    ) -> None:
        self.connection = connection
        self.reading: dict[str, Durable] = {}
        self.is_alone = False
        self._inbox = f"{connection.client.new_inbox()}."
        self.alone = f"{self._inbox}alone"
        self._api, self._on_gone, self._is_paused = api, on_gone, is_paused

    @property
    def is_open(self) -> bool:
        """Whether messages can still arrive that would be missed."""
        return self.connection.lost is None and any(
            durable.outstanding > 0 and not durable.generation
            for durable in self.reading.values()
        )

    @property
    def is_overdue(self) -> bool:
        """Whether JetStream has failed to end a pull in time."""
        latest = time.monotonic() - _GRACE
        return any(
            durable.outstanding > 0 and durable.ends_at < latest
            for durable in self.reading.values()
            if not self._is_paused(durable.topic)
        )

    async def listen(self, on_message: Callable[[Msg], Awaitable[None]]) -> None:
        """Call `on_message` with each message that arrives, in order."""
        await self.connection.client.subscribe(
            f"{self._inbox}>", cb=on_message, pending_bytes_limit=0
        )

    async def ask(self, limit: int, wait: float) -> None:
        """Open a pull on each durable that is read here and has none."""
        for place, durable in list(self.reading.items()):
            if self._is_paused(durable.topic):
                continue
            now = time.monotonic()
            # NATS 2.9 says nothing if a pull ends while messages are left. A replica
            # that reads alone needn't wait for its pulls when it leaves.
            lasts = max(wait, jittered(_ALONE)) if durable.generation else wait
            if durable.outstanding <= 0:
                durable.ends_at = now + lasts
            elif now < durable.again_at:
                continue
            durable.again_at = now + lasts + _LATE
            durable.outstanding = limit
            request = {"batch": limit, "expires": int(lasts * NANOSECONDS)}
            await self.connection.client.publish(
                f"{self._api}.CONSUMER.MSG.NEXT.{place}",
                json.dumps(request).encode(),
                f"{self._inbox}{place}",
            )

    async def read(self, got: Msg) -> Entry | None:
        """Read a message of a stream; return None for a status message of a pull."""
        if not got.reply.startswith(ACKS):
            await self._end(got)
            return None
        tokens = got.reply.split(".")
        # Newer servers put the domain and the account before the stream.
        first = 2 if len(tokens) == _SHORT_ACK else 4
        stream, name, delivered, sequence, number, stored_at = tokens[first : first + 6]
        durable = self.reading.get(f"{stream}.{name}")
        if durable is None:
            return None  # another replica reads it now
        if durable.generation:
            if int(number) != durable.number + 1:
                await self.connection.drop("a delivery was lost")
            if self.connection.lost is not None:
                return None
            durable.number += 1
        durable.outstanding -= 1
        durable.ends_at = durable.again_at
        if not durable.has_topic_of(got.subject):
            await self.connection.client.publish(got.reply, b"+ACK")
            return None
        headers = got.headers or {}
        problem = None
        try:
            message = decode_message(headers, got.data)
        except InvalidMessageError as error:
            topic = Shard.named(raw_text(got.subject)).topic
            message = Message(topic, got.data, headers=raw_headers(headers))
            problem = str(error)
        if durable.max_deliver is not None and int(delivered) >= durable.max_deliver:
            problem = problem or (
                f"was delivered {count(int(delivered), 'time')} without being "
                "settled, and max_deliver prevents another delivery"
            )
        return Entry(
            # A stream that was made again numbers its messages from 1 again.
            at=(durable.line, sequence, stored_at),
            place=int(sequence),
            line=durable.line,
            key=message.key,
            reply=got.reply,
            message=message,
            problem=problem,
            history=FIRST_DELIVERY
            if delivered == "1" and int(sequence) > durable.started
            else durable.history,
            published_at=int(stored_at) / NANOSECONDS,
        )

    async def _end(self, got: Msg) -> None:
        place = got.subject.removeprefix(self._inbox)
        self.is_alone |= got.subject == self.alone
        if (durable := self.reading.get(place)) is None:
            return
        durable.outstanding = 0
        headers = got.headers or {}
        status, reason = headers.get("Status"), headers.get("Description", "")
        if status == _NO_RESPONDERS or "Deleted" in reason:
            del self.reading[place]
            self._on_gone()
        elif status not in _ENDED:
            await self.connection.drop(f"it ended the pull: {reason}")


async def settle(
    connection: NatsConnection, outcomes: Iterable[tuple[Entry, float | None]]
) -> None:
    """Ack entries, or nack those with a delay in seconds, in order."""
    commands = []
    for entry, delay in outcomes:
        word = b"+ACK" if delay is None else b"-NAK"
        if delay:
            word = b'-NAK {"delay": %d}' % int(delay * NANOSECONDS)
        commands.append(
            b"PUB %b %d\r\n%b\r\n" % (entry.reply.encode(), len(word), word)
        )
    await connection.client.publish_all(commands)
    await connection.flush()
