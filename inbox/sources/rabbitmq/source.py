"""A source that reads a RabbitMQ queue, or its shards; each consumer has its own.

RabbitMQ delivers messages to any consumer of a queue that has room, so one replica at a
time consumes, and the others stand by, unless `share` is called. With shards, it deals
the messages to them, and replicas share them. A replica with another number of shards
than the others begins when they have stopped: it empties their shards and deletes them.
If it ends before that, the next one does the same. A message that waits
for its retry is held here unacked, as are later messages of its key: whatever happens
to this process, RabbitMQ redelivers them, in order and before all others.

A quorum queue appends what is returned to earlier returns that nobody has received yet.
So a replica that keeps order has one consumer, whose prefetch never changes.
"""

import asyncio
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from typing import Final, Self
from uuid import UUID

from pillarbox.inbox.consuming.backlog import Backlog
from pillarbox.inbox.poison.history import FIRST_DELIVERY, REDELIVERED
from pillarbox.inbox.source import Abilities, Arrived, Delivery, EntryDelivery
from pillarbox.inbox.sources.rabbitmq.queue import (
    OWNER_SUFFIX,
    Arrival,
    Queue,
    QueueConfig,
    binding_key,
)
from pillarbox.inbox.sources.rabbitmq.shards import (
    LONGEST_SUFFIX,
    MOST,
    Dealer,
    Shards,
    consumers,
    create,
    delete,
    existing,
    join,
    members_of,
)
from pillarbox.outbox.bounded_dict import BoundedDict
from pillarbox.outbox.brokers.rabbitmq.amqp import AmqpConnection
from pillarbox.outbox.brokers.rabbitmq.connection import (
    BROKEN,
    rabbitmq_parameters,
    rabbitmq_unavailable,
)
from pillarbox.outbox.brokers.rabbitmq.message import from_delivery, published_at
from pillarbox.outbox.brokers.rabbitmq.options import MAX_NAME_BYTES, RabbitMQOptions
from pillarbox.outbox.brokers.shards import Shard
from pillarbox.outbox.errors import BrokerUnavailableError, ConfigError, shorten
from pillarbox.outbox.retry import jittered

_LEAST_PREFETCH: Final = 100
# The same for all replicas, whatever their limits: see above. It is how far urgent
# messages are found behind others.
_PREFETCH_IN_ORDER: Final = 6000
_MAX_PREFETCH: Final = 65_535
_MAX_ASIDE: Final = 10_000
_ASIDE_PER_SECOND: Final = 2000
# How often a replica looks whether it can consume, and which shards.
_LOOK: Final = 0.25
# How long a replica without a handler lets others consume, and the longest time until
# it does so again, which grows each time.
_STEP_ASIDE: Final = 1.0
_LONGEST_TURN: Final = 30.0


@dataclass(eq=False, slots=True, kw_only=True)
class Received(Arrived):
    """A message on the channel on which it arrived, with its delivery `tag` there.

    `attempts` is how often it failed here, on this channel or an earlier one.
    """

    queue: Queue
    tag: int


class RabbitMQSource:
    """A source of the messages in one consumer's queue.

    Args:
        url: `amqp://user:password@host:port/vhost`, `amqps://…` or `rabbitmq://…`,
            with the options of `RabbitMQOptions` and pika's own.
        consumer: the name of the queue, unless the option `queue` specifies one.
        topics: the topics to bind the queue to, each exact or a prefix that ends with a
            dot, followed by `*`.
        poll_interval: how long `receive` waits.
    """

    def __init__(
        self,
        url: str,
        *,
        consumer: str,
        topics: Sequence[str],
        poll_interval: timedelta = timedelta(seconds=1),
    ) -> None:
        self._url, options = RabbitMQOptions.parse(url)
        self._parameters = rabbitmq_parameters(self._url, options)
        for topic in topics:
            binding_key(topic)
        name = options.queue or consumer
        most = MAX_NAME_BYTES - len(LONGEST_SUFFIX + OWNER_SUFFIX)
        if len(name.encode()) > most:
            raise ConfigError(
                f"consumer {shorten(name)}: has more than {most} bytes, "
                "RabbitMQ's limit for the name of a queue; shorten it"
            )
        self._config = QueueConfig(
            name=name,
            exchange=options.exchange,
            topics=tuple(topics),
            classic=options.queue_type == "classic",
            single=options.single_active_consumer,
        )
        self._of = options.shards
        if self._of > 1 and self._config.single:
            raise self._impossible("single_active_consumer")
        self._prefetch = options.prefetch
        self._shards = Shards(
            self._parameters,
            min(options.prefetch or _PREFETCH_IN_ORDER, _MAX_PREFETCH),
            self._keep,
            self._drop,
        )
        self._dealer: Dealer | None = None
        # Received before the messages in other layouts are handled.
        self._early: list[Arrival] = []
        self._is_admitted = False
        # The numbers of shards in the broker; None until this replica has looked.
        self._layouts: list[int] | None = None
        self._look_at = -math.inf
        self._places = count()
        self._poll = poll_interval.total_seconds()
        self._link: AmqpConnection | None = None
        self._queue: Queue | None = None
        self._backlog: Backlog[Received] = Backlog()
        # Delivery tags to hand back, each with the time at which to do so:
        # RabbitMQ would deliver it again at once, before all others.
        self._aside: dict[int, float] = {}
        self._keys_aside: dict[str, float] = {}
        self._window = 0
        self._arrived = asyncio.Event()
        # Kept across channels: unacked messages are redelivered on the next channel.
        self._failures: BoundedDict[UUID, tuple[int, float]] = BoundedDict()
        self._done: BoundedDict[UUID, bool] = BoundedDict()
        self._shared = False
        self._standing_by: Collection[str] = ()
        # When to step aside, until when, and from when on it may happen again.
        self._leave_at = math.inf
        self._aside_until = self._stays_until = -math.inf
        self._turn = _STEP_ASIDE
        self._warnings: list[str] = []
        self.abilities = Abilities(
            leave_out=self._backlog.leave_out,
            identify=self._identify,
            share=self._share,
            standing_by=lambda: self._standing_by,
            warnings=self._all_warnings,
            pauses=self._know_pauses,
        )

    def _all_warnings(self) -> list[str]:
        others = [] if self._is_admitted else self._others
        queues = [self._queue] if self._queue and self._chooses else []
        told = self._warnings + [
            f"queue {each.name!r} gets no marker, so after a restart of RabbitMQ "
            f"messages of a key can be handled out of order: {each.unmarked}"
            for each in queues + self._shards.queues
            if each.unmarked
        ]
        return told + [
            f"queue {self._config.name!r} is in use with shards={of}; this replica has "
            f"shards={self._of}, and waits until all replicas with shards={of} have "
            "stopped and their messages are handled"
            for of in others
        ]

    @property
    def _others(self) -> list[int]:
        return [of for of in self._layouts or () if of != self._of]

    def _impossible(self, other: str) -> ConfigError:
        return ConfigError(
            f"shards={self._of}: can't be combined with {other}; remove one of the two"
        )

    def _share(self) -> None:
        if self._of > 1:
            raise self._impossible('Consumer(order="none")')
        self._shared = True

    def _know_pauses(self, is_paused: Callable[[str], bool]) -> bool:
        return not self._shared and self._backlog.leave_out_paused(is_paused)

    def _identify(self, id: str) -> None:
        self._config = replace(self._config, member=id)

    async def __aenter__(self) -> Self:
        """Connect; create the exchange, the queue and its bindings if missing.

        Raises:
            BrokerUnavailableError: RabbitMQ is unreachable, or rejects the connection.
            ConfigError: something is missing, and the user lacks the privilege to
                create it; or the queue has shards, and replicas without order.
        """
        try:
            queue = await self._connect()
            if self._chooses:
                await queue.take_lock()
        except BaseException as error:
            await self._disconnect()
            if isinstance(error, BROKEN):
                raise rabbitmq_unavailable(self._url, error) from error
            raise
        return self

    @property
    def _chooses(self) -> bool:
        """Whether the replicas choose who consumes, not RabbitMQ."""
        return not (self._shared or self._config.single)

    async def __aexit__(self, *exc_info: object) -> None:
        """Send the scheduled acks, and return all other messages to the queue."""
        await self._leave()

    async def _leave(self) -> None:
        queue = self._queue
        try:
            settling = [self._shards.close()]
            if queue is not None and queue.why_lost is None:
                settling.append(queue.settle())
            await asyncio.gather(*settling, return_exceptions=True)
        finally:
            await self._disconnect()

    async def receive(self, *, limit: int) -> Sequence[Delivery]:
        """Wait for deliveries, and return at most `limit`."""
        try:
            if self._leave_at <= time.monotonic():
                await self._step_aside()
            queue = self._queue
            if queue is None:
                queue = await self._connect()
            elif (reason := queue.why_lost or self._shards.why_lost) is not None:
                problem = self._dealer.failure if self._dealer else ""
                await self._disconnect()
                raise BrokerUnavailableError(problem) if problem else reason
            if self._look_at <= time.monotonic():
                await self._look(queue, limit)
            if not (queue.consuming or self._shards.queues):
                await asyncio.sleep(min(self._poll, jittered(_LOOK)))
                return []
            if self._shared:
                await self._hand_back(queue)
            if not self._backlog.ready:
                for each in (queue, *self._shards.queues):
                    each.flush()
                await self._wait(queue)
        except ConfigError as error:
            raise BrokerUnavailableError(str(error)) from error
        except BROKEN as error:
            raise rabbitmq_unavailable(self._url, error) from error
        found = [r for r in self._backlog.take(limit) if not self._is_behind(r)]
        for received in found:
            received.queue.begun += 1
        return [EntryDelivery(self, received, received) for received in found]

    def acked(self, received: Received) -> None:
        """Schedule the ack of a message, unless its connection has been lost."""
        self._failures.pop(received.message.id, None)
        self._done[received.message.id] = True
        received.queue.begun -= 1
        received.queue.ack(received.tag)

    def nacked(self, received: Received, delay: timedelta | None) -> None:
        """Return a message to its place in the order, or delay it."""
        if delay is not None:
            received.attempts += 1
            due = time.monotonic() + delay.total_seconds()
            self._failures[received.message.id] = (received.attempts, due)
        received.queue.begun -= 1
        if not received.queue.consuming:
            return  # RabbitMQ redelivers it
        if delay is None:
            self._backlog.add(received)
        else:
            self._backlog.defer(received, delay.total_seconds())
        self._arrived.set()

    def handed_back(self, received: Received, delay: timedelta) -> bool:
        """Return a message to the queue after the delay; meanwhile keep its tag only.

        To keep its order it waits here, and the next `receive` lets another replica
        consume, if there is one.
        """
        if received.queue is not self._queue:
            # RabbitMQ redelivers it, or it is in a shard, which nobody else takes.
            return not received.queue.consuming
        seconds = delay.total_seconds()
        if not self._shared:
            now = time.monotonic()
            self._failures[received.message.id] = (received.attempts, now + seconds)
            self._backlog.defer(received, seconds)
            self._leave_at = min(self._leave_at, max(now, self._stays_until))
            self._arrived.set()
            return True
        if self._config.single or len(self._aside) >= _MAX_ASIDE:
            return False
        if self._window > (self._prefetch or 0):
            # Each return of a flood fills another replica's prefetch only once.
            seconds = min(seconds, 1 + len(self._aside) / _ASIDE_PER_SECOND)
        due = time.monotonic() + seconds
        self._aside[received.tag] = due
        if received.key is not None:
            self._keys_aside.setdefault(received.key, due)
        return True

    def _is_behind(self, received: Received) -> bool:
        """Return whether a message of its key is aside; then it follows that."""
        due = self._keys_aside.get(received.key or "")
        if due is None or received.key is None:
            return False
        self._aside[received.tag] = due
        return True

    async def _hand_back(self, queue: Queue) -> None:
        now = time.monotonic()
        for tag in sorted(tag for tag, due in self._aside.items() if due <= now):
            del self._aside[tag]
            queue.requeue(tag)
        self._keys_aside = {k: due for k, due in self._keys_aside.items() if due > now}
        if 2 * len(self._aside) >= self._window:
            # Messages set aside leave too little of the prefetch for others.
            await queue.consume(self._window, self._keep)
            self._window *= 2

    async def _step_aside(self) -> None:
        """Let another replica consume, if there is one."""
        now = time.monotonic()
        is_new = now > self._stays_until + 2 * _LONGEST_TURN
        self._turn = _STEP_ASIDE if is_new else min(2 * self._turn, _LONGEST_TURN)
        self._aside_until = now + _STEP_ASIDE
        self._stays_until = self._aside_until + self._turn
        self._leave_at = math.inf
        await self._leave()

    async def _look(self, queue: Queue, limit: int) -> None:
        """Consume from the queue if it's this replica's turn, and share the shards."""
        link = self._link
        assert link is not None
        if not queue.consuming and await self._may_consume(queue):
            self._prefetch = self._prefetch or (
                max(_LEAST_PREFETCH, 4 * limit) if self._shared else _PREFETCH_IN_ORDER
            )
            self._window = min(self._prefetch, _MAX_PREFETCH)
            # Others may have changed it. Without turns, there are no shards: see above.
            self._layouts = None if self._chooses else []
            await queue.consume(self._window, self._arrive)
        if self._layouts is None:
            self._layouts = await self._existing()
        if queue.consuming and not self._is_admitted:
            await self._admit(link, queue)
        if self._of > 1 and self._queue is queue:
            await self._take_share(link)
        waits = not (self._shards.queues if self._of > 1 else queue.consuming)
        self._standing_by = self._config.topics if waits else ()
        is_done = self._of == 1 and self._is_admitted
        self._look_at = math.inf if is_done else time.monotonic() + jittered(_LOOK)

    async def _may_consume(self, queue: Queue) -> bool:
        if self._aside_until > time.monotonic():
            return False
        return not self._chooses or await queue.take_turn()

    async def _existing(self, numbers: Sequence[int] = range(2, MOST + 1)) -> list[int]:
        assert self._link is not None
        optional = self._of == 1
        name = self._config.name
        return await existing(self._link, name, numbers, optional=optional)

    async def _admit(self, link: AmqpConnection, queue: Queue) -> None:
        """Begin with what arrives, once the messages in other layouts are handled.

        All that changes layouts is done on the connection that has the lock.
        """
        name = self._config.name
        assert self._layouts is not None
        for of in self._others:
            if await consumers(link, members_of(name, of).name):
                await self._leave()
                self._aside_until = time.monotonic() + _STEP_ASIDE
                return
            if not self._shards.queues:
                await create(link, self._config, of)
            await self._shards.take(link, self._config, of, of)
            if not await self._shards.are_empty(link, Shard(name, of=of).all):
                return
            # Shards of the old number are deleted while no one else can read them.
            await delete(link, name, of)
            await self._shards.close()
            self._layouts.remove(of)
        if self._of > 1:
            await create(link, self._config, self._of)
            self._layouts = [self._of]
            self._dealer = Dealer(link, queue, name, self._of)
            await self._dealer.begin()
        self._is_admitted = True
        early, self._early = self._early, []
        for arrival in early:
            self._arrive(queue, arrival)

    async def _take_share(self, link: AmqpConnection) -> None:
        """Read as many shards as is fair."""
        assert self._layouts is not None
        if self._of not in self._layouts and await self._existing([self._of]):
            self._layouts = [self._of]
        if self._of in self._layouts:
            name = members_of(self._config.name, self._of).name
            most = math.ceil(self._of / max(1, await consumers(link, name)))
            await self._shards.leave(most)
            await self._shards.take(link, self._config, self._of, most)

    async def _connect(self) -> Queue:
        if self._link is None or not self._link.is_open:
            self._link = await AmqpConnection.open(self._parameters)
        queue = await Queue.open(self._link, self._config)
        self._queue = queue
        if not self._chooses and (found := await self._existing()):
            raise ConfigError(
                f"queue {self._config.name!r} has messages in {found[0]} shards; first "
                'run the consumer with order="key", shards=1 and without '
                "single_active_consumer, until they are handled"
            )
        if self._of > 1:
            self._layouts = await self._existing()
            await join(self._link, self._config.name, self._of)
        if queue.limited:
            self._warnings = [
                f"queue {self._config.name!r} lacks x-delivery-limit=-1, so RabbitMQ"
                " drops messages after a number of returns, by default 20; set"
                " delivery-limit to -1 in a policy, or delete the empty queue, which"
                " the consumer recreates"
            ]
        queue.when_lost(self._arrived.set)
        if not self._shared:
            # Otherwise, it would keep the lock until there is room for messages.
            queue.when_lost(self._link.abort)
        return queue

    async def _disconnect(self) -> None:
        """End the connections, and forget everything received on them."""
        link, self._link = self._link, None
        if self._queue is not None:
            self._queue.consuming = False
        self._queue = self._dealer = self._layouts = None
        self._is_admitted = False
        self._look_at = -math.inf
        self._early.clear()
        self._backlog.remove(lambda _: True)
        self._aside.clear()
        self._keys_aside.clear()
        if link is not None and (self._config.single or not self._shared):
            # An orderly close would cancel the consumer first, so the next replica
            # would start before it has the returned messages.
            link.abort()
        await self._shards.close()
        if link is not None:
            await link.close()

    def _drop(self, queue: Queue) -> None:
        """Forget what has arrived from a queue and isn't begun."""
        queue.consuming = False
        self._backlog.remove(lambda received: received.queue is queue)

    def _arrive(self, queue: Queue, arrival: Arrival) -> None:
        if queue is not self._queue:
            return
        if not self._is_admitted:
            self._early.append(arrival)
        elif self._dealer is not None:
            self._dealer.deal(arrival)
        else:
            self._keep(queue, arrival)

    def _keep(self, queue: Queue, arrival: Arrival) -> None:
        if not queue.consuming:
            return
        tag, routing_key, is_redelivered, properties, body = arrival
        message, problem = from_delivery(properties, routing_key, body)
        if is_redelivered and message.id in self._done:
            queue.ack(tag)  # the first ack was lost with its connection
            return
        attempts, due = self._failures.get(message.id, (0, 0.0))
        received = Received(
            queue=queue,
            tag=tag,
            place=next(self._places),
            key=message.key,
            message=message,
            problem=problem,
            history=REDELIVERED if is_redelivered else FIRST_DELIVERY,
            published_at=published_at(properties),
            attempts=attempts,
        )
        if (wait := due - time.monotonic()) > 0:
            self._backlog.defer(received, wait)
        else:
            self._backlog.add(received)
        self._arrived.set()

    async def _wait(self, queue: Queue) -> None:
        deadline = min(
            time.monotonic() + self._backlog.patience(self._poll), self._look_at
        )
        while not self._backlog.ready and not (queue.why_lost or self._shards.why_lost):
            patience = deadline - time.monotonic()
            if patience <= 0:
                return
            self._arrived.clear()
            await self._backlog.wait_for(self._arrived, patience)
