"""JetStream's durable consumers, and the deliveries that they send.

A consumer has one durable for each of its topics, and for each shard of a topic, on
each stream: servers before 2.10 filter by one subject only, and this way no replica
ever receives a topic that it has no handler for. Names and responses are those of
JetStream's API.
"""

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, TypeAlias

from pillarbox.inbox.consuming.keeper import Held
from pillarbox.inbox.poison.history import REDELIVERED, History, TakenOver
from pillarbox.outbox.brokers.nats.connection import ApiError, NatsConnection
from pillarbox.outbox.brokers.nats.message import subject_problem
from pillarbox.outbox.brokers.shards import Shard
from pillarbox.outbox.errors import ConfigError, shorten

NANOSECONDS: Final = 1_000_000_000
# Without a generation: shared, or created by an administrator.
FIRST: Final = (0, "")
# Streams with workqueue retention take one durable for a subject, from the oldest on.
_ONLY_ONE: Final = frozenset({10099, 10100, 10101})
_NOT_FOUND: Final = 10014
_MISSING: Final = 404
# The settings that a new generation doesn't copy from the last one.
_RENEWED: Final = frozenset(
    {"name", "filter_subjects", "deliver_policy", "opt_start_seq", "opt_start_time"}
)
_MAX_SLUG: Final = 60

Rank: TypeAlias = tuple[int, str]


@dataclass(eq=False, slots=True, kw_only=True)
class Entry(Held):
    """A delivery as it was read; `place` is its sequence number in the stream."""

    line: str
    reply: str


@dataclass(slots=True)
class Durable:
    """One durable consumer on its stream, and the pull that is open on it.

    Attributes:
        subject: a topic, a shard of one, or the start of topics followed by `>`.
        generation: the end of the name of the one that this replica reads alone; kept
            over a new connection, as are deliveries that it holds.
        created_at: when it was created, as NATS writes it.
        old: how many messages it began with if it was the first one of its name.
        started: up to this message, an earlier generation may have delivered them.
        history: of messages that were delivered before.
        number: of the last delivery.
        ends_at: when the pull ends, or the first of several that gave no answer.
        again_at: when the next one follows in any case.
    """

    stream: str
    name: str
    subject: str
    generation: str = ""
    created_at: str = ""
    old: int | None = None
    ack_wait: float = 0.0
    max_deliver: int | None = None
    started: int = 0
    history: History = REDELIVERED
    number: int = 0
    outstanding: int = 0
    ends_at: float = 0.0
    again_at: float = 0.0

    @property
    def line(self) -> str:
        """The stream and the name without a generation."""
        return f"{self.stream}.{self.name}"

    @property
    def place(self) -> str:
        """The stream and the name, as they appear in JetStream's subjects."""
        return f"{self.line}{self.generation}"

    @property
    def topic(self) -> str:
        """The topic as the consumer names it."""
        return re.sub(r">$", "*", Shard.named(self.subject).topic)

    @property
    def layout(self) -> str:
        """Identifies its topic with this number of shards on this stream."""
        shard = Shard.named(self.subject)
        return f"{self.stream} {shard.topic} {shard.of}"

    def has_topic_of(self, subject: str) -> bool:
        """Return whether the topic of a subject that it gets is one of its topics.

        `orders.>` also gets the shards of `orders`, which doesn't begin with `orders.`.
        """
        start = self.subject.removesuffix(">")
        return start == self.subject or Shard.named(subject).topic.startswith(start)

    async def open(
        self,
        connection: NatsConnection,
        wanted: Mapping[str, Any],
        default: Mapping[str, Any],
        shared: bool,
    ) -> bool:
        """Begin to read it: the one that replicas share, or a new generation.

        A new one begins with unsettled messages of existing ones, and replaces these.
        `wanted` changes the configuration of an existing one, `default` doesn't.

        Returns False if another replica was faster.

        Raises:
            ApiError: JetStream returned an error.
            ConfigError: one isn't a pull consumer with explicit acks.
        """
        found = await self._generations(connection)
        own = FIRST
        if not shared:
            own = found[-1][0] + 1 if found else 1, secrets.token_hex(4)
            self.history = TakenOver()
        self.generation = suffix(own)
        try:
            info = await self._create_after(connection, found, own, wanted, default)
        except ApiError as error:
            if error.number not in {*_ONLY_ONE, _NOT_FOUND}:
                raise
            self.generation = ""
            return False
        others = await self._generations(connection)
        is_last = shared or others[-1:] == [own]
        for rank in {*others} - {own} if is_last else {own}:
            await self._call(connection, "DELETE", rank)
        self.generation = suffix(own) if is_last else ""
        self.created_at = info["created"]
        self.old = None if found else int(info["num_pending"])
        self.number = self.outstanding = 0
        return is_last

    async def _create_after(
        self,
        connection: NatsConnection,
        found: Sequence[Rank],
        own: Rank,
        wanted: Mapping[str, Any],
        default: Mapping[str, Any],
    ) -> dict[str, Any]:
        infos = {rank: await self._call(connection, "INFO", rank) for rank in found}
        infos = {rank: info for rank, info in infos.items() if info is not None}
        if found and not infos:
            raise ApiError({"err_code": _NOT_FOUND, "description": "another begins"})
        named = {**wanted, "durable_name": f"{self.name}{self.generation}"}
        named["filter_subject"] = self.subject
        config, floor = {**default}, 0
        for info in infos.values():
            self.set_limits(info["config"])
            config |= {k: v for k, v in info["config"].items() if k not in _RENEWED}
            # As long as nothing is acked, NATS shows no floor.
            began = info["config"].get("opt_start_seq", 1) - 1
            floor = max(floor, began, info["ack_floor"]["stream_seq"])
            self.started = max(self.started, info["delivered"]["stream_seq"])
        if own in infos:
            return await self._create(connection, infos[own]["config"] | named)
        if own != FIRST:
            # Otherwise each interrupted takeover would leave one more to the next.
            for rank in found[:-1]:
                await self._call(connection, "DELETE", rank)
        config |= {**named, "deliver_policy": "all"}
        start = {"deliver_policy": "by_start_sequence", "opt_start_seq": floor + 1}
        try:
            return await self._create(connection, config | (start if infos else {}))
        except ApiError as error:
            if error.number not in _ONLY_ONE or not infos:
                raise
            # Settled messages are no longer in such a stream.
            for rank in found:
                await self._call(connection, "DELETE", rank)
            return await self._create(connection, config)

    async def _generations(self, connection: NatsConnection) -> list[Rank]:
        """Return which durables of this name exist, the oldest first."""
        form = re.compile(rf"{re.escape(self.name)}(?:-(\d+)-([0-9a-f]{{8}}))?")
        names: list[str] = []
        while True:
            body = {"offset": len(names)}
            answer = await connection.ask(f"CONSUMER.NAMES.{self.stream}", body)
            names += answer["consumers"] or []
            if not answer["consumers"] or len(names) >= answer["total"]:
                break
        found = filter(None, map(form.fullmatch, names))
        return sorted((int(each[1] or 0), each[2] or "") for each in found)

    async def _call(self, connection: NatsConnection, what: str, rank: Rank) -> Any:
        """Call JetStream about a durable of this name; return None if it is missing."""
        try:
            return await connection.ask(f"CONSUMER.{what}.{self.line}{suffix(rank)}")
        except ApiError as error:
            if error.code != _MISSING:
                raise
            return None

    def set_limits(self, config: Mapping[str, Any]) -> None:
        """Take the limits from a durable's configuration.

        Raises:
            ConfigError: it isn't a pull consumer with explicit acks.
        """
        if config.get("deliver_subject") or config["ack_policy"] != "explicit":
            raise ConfigError(
                f"NATS consumer {self.name!r} on stream {self.stream!r}: must be "
                "a pull consumer with explicit acks; delete it, and it will be "
                "recreated"
            )
        self.ack_wait = config["ack_wait"] / NANOSECONDS
        most = config.get("max_deliver", -1)
        self.max_deliver = most if most > 0 else None

    async def _create(
        self, connection: NatsConnection, config: Mapping[str, Any]
    ) -> dict[str, Any]:
        info: dict[str, Any] = await connection.ask(
            f"CONSUMER.DURABLE.CREATE.{self.place}",
            {"stream_name": self.stream, "config": config},
        )
        self.set_limits(info["config"])
        return info


def suffix(rank: Rank) -> str:
    """Return the end of a durable's name."""
    return "" if rank == FIRST else "-{}-{}".format(*rank)


async def find_durables(
    connection: NatsConnection,
    consumer: str,
    topics: Collection[str],
    stream: str | None,
) -> list[Durable]:
    """Return the durables of a consumer's topics, on one stream or all that match.

    Raises:
        ConfigError: no stream captures a topic.
    """
    found = []
    for subject in subjects_of(topics):
        streams: Sequence[str] = [stream] if stream is not None else []
        if not streams:
            answer = await connection.ask("STREAM.NAMES", {"subject": subject})
            streams = answer.get("streams") or []
        if not streams:
            raise ConfigError(
                f"no stream captures topic {shorten(subject)}: add it to the subjects "
                "of a stream, or name one by stream= and create= in the URL"
            )
        name = durable_name(consumer, subject)
        found += [Durable(each, name, subject) for each in streams]
    return found


def subjects_of(topics: Collection[str]) -> list[str]:
    """Return the subjects of topics, without those that another subject covers.

    Raises:
        ConfigError: a topic can't be a subject.
    """
    prefixes = [topic[:-1] for topic in topics if topic.endswith("*")]
    for prefix in prefixes:
        if prefix and not prefix.endswith("."):
            raise ConfigError(
                f"topic {shorten(f'{prefix}*')}: NATS can't match parts of a word; "
                "end it with .*"
            )
    subjects = []
    for topic in dict.fromkeys(topics):
        start = topic.removesuffix("*")
        covered = any(
            start.startswith(prefix) and topic != f"{prefix}*" for prefix in prefixes
        )
        if covered:
            continue
        if problem := subject_problem(f"{start}x" if topic.endswith("*") else topic):
            raise ConfigError(problem)
        subjects.append(f"{start}>" if topic.endswith("*") else topic)
    return subjects


def durable_name(consumer: str, subject: str) -> str:
    """Return a readable name for the durable of a subject, unique to the subject."""
    readable = re.sub(r"[^A-Za-z0-9-]+", "_", subject.removesuffix(".>"))[:_MAX_SLUG]
    return f"{consumer}_{readable}_{sha256(subject.encode()).hexdigest()[:8]}"
