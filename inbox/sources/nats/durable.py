"""JetStream's durable consumers, and the deliveries that they send.

A consumer has one durable for each of its topics on each stream: servers before 2.10
filter by one subject only, and this way no replica ever receives a topic that it has no
handler for. Names and responses are those of JetStream's API.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, TypeAlias

from nats.aio.subscription import Subscription

from inbox.consuming.keeper import Held
from outbox.brokers.nats.connection import ApiError, NatsConnection
from outbox.brokers.nats.message import subject_problem
from outbox.errors import ConfigError, shorten

NANOSECONDS: Final = 1_000_000_000
# Without a generation: shared, or created by an administrator.
FIRST: Final = (0, "")
# Streams with workqueue retention take one durable for a subject, from the oldest on.
ONLY_ONE: Final = frozenset({10099, 10100, 10101})
NOT_FOUND: Final = 10014
_MISSING: Final = 404
# What a new generation doesn't take over from the last one.
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
        generation: the end of its name, if one replica at a time reads it.
        is_read: whether this replica reads it.
        started: up to this message, an earlier generation may have delivered them.
        number: of the last delivery.
        seen_at: when the replica that reads it was last heard of.
        asked_at, asked_by: when another replica last asked who reads it, and which.
        aside_until: until when this one leaves it to others.
    """

    stream: str
    name: str
    subject: str
    generation: str = ""
    is_read: bool = False
    ack_wait: float = 0.0
    max_deliver: int | None = None
    started: int = 0
    number: int = 0
    outstanding: int = 0
    ends_at: float = 0.0
    subscription: Subscription | None = None
    is_old: bool = False
    is_vacant: bool = False
    is_elsewhere: bool = False
    seen_at: float = 0.0
    look_at: float = 0.0
    asked_at: float = -math.inf
    asked_by: str = ""
    aside_until: float = 0.0

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
        return re.sub(r">$", "*", self.subject)

    async def join(
        self,
        connection: NatsConnection,
        wanted: Mapping[str, Any],
        default: Mapping[str, Any],
    ) -> int:
        """Create the durable that replicas share, or apply `wanted` to an existing one.

        Returns how many messages a new one begins with.

        Raises:
            ApiError: JetStream returned an error.
            ConfigError: the durable isn't a pull consumer with explicit acks.
        """
        self.is_read = True
        info = await self.call(connection, "INFO")
        if info is None:
            found = await self.generations(connection)
            info, _ = await self.create_after(connection, found, wanted, default)
            for rank in found:
                await self.call(connection, "DELETE", rank)
            return 0 if found else int(info.get("num_pending", 0))
        self.set_limits(info["config"])
        config = {**info["config"], **wanted, **self._own_config}
        if config != info["config"]:
            await self._create(connection, config)
        return 0

    async def create_after(
        self,
        connection: NatsConnection,
        found: Sequence[Rank],
        wanted: Mapping[str, Any],
        default: Mapping[str, Any],
    ) -> tuple[dict[str, Any], dict[Rank, dict[str, Any]]]:
        """Create it so that it begins with what is unsettled in all of `found`.

        Returns its description, and those of the others, the last of which has the
        settings.

        Raises:
            ApiError: JetStream returned an error.
            ConfigError: another one isn't a pull consumer with explicit acks.
        """
        infos: dict[Rank, dict[str, Any]] = {}
        for rank in found:
            if (info := await self.call(connection, "INFO", rank)) is not None:
                self.set_limits(info["config"])
                infos[rank] = info
        if found and not infos:
            raise ApiError({"err_code": NOT_FOUND, "description": "another begins"})
        config, floor = {**default}, 0
        for info in infos.values():
            config |= {k: v for k, v in info["config"].items() if k not in _RENEWED}
            # As long as nothing is acked, NATS shows no floor.
            began = info["config"].get("opt_start_seq", 1) - 1
            floor = max(floor, began, info["ack_floor"]["stream_seq"])
        config |= {**wanted, **self._own_config, "deliver_policy": "all"}
        start = {"deliver_policy": "by_start_sequence", "opt_start_seq": floor + 1}
        try:
            info = await self._create(connection, config | (start if infos else {}))
        except ApiError as error:
            if error.number not in ONLY_ONE or not infos:
                raise
            # Settled messages are no longer in such a stream.
            for rank in found:
                await self.call(connection, "DELETE", rank)
            info = await self._create(connection, config)
        return info, infos

    async def generations(self, connection: NatsConnection) -> list[Rank]:
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

    async def call(
        self, connection: NatsConnection, what: str, rank: Rank = FIRST
    ) -> Any:
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

    @property
    def _own_config(self) -> dict[str, str]:
        name = f"{self.name}{self.generation}"
        return {"durable_name": name, "filter_subject": self.subject}

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
