"""JetStream's durable consumers, and the deliveries that they send.

A consumer has one durable for each of its topics on each stream: servers before 2.10
filter by one subject only, and this way no replica ever receives a topic that it has no
handler for. Names and responses are those of JetStream's API.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

from inbox.consuming.keeper import Held
from outbox.brokers.nats.connection import ApiError, NatsConnection
from outbox.brokers.nats.message import subject_problem
from outbox.errors import ConfigError, shorten

NANOSECONDS: Final = 1_000_000_000
_NOT_FOUND: Final = 404
_MAX_SLUG: Final = 60


@dataclass(eq=False, slots=True, kw_only=True)
class Entry(Held):
    """A delivery as it was read; `place` is its sequence number in the stream."""

    reply: str


@dataclass(slots=True)
class Durable:
    """One durable consumer on its stream, and the pull that is open on it."""

    stream: str
    name: str
    subject: str
    ack_wait: float = 0.0
    max_deliver: int | None = None
    outstanding: int = 0
    ends_at: float = 0.0

    @property
    def place(self) -> str:
        """The stream and the name, as they appear in JetStream's subjects."""
        return f"{self.stream}.{self.name}"

    async def join(
        self,
        connection: NatsConnection,
        wanted: Mapping[str, Any],
        default: Mapping[str, Any],
    ) -> int:
        """Create the durable, or apply `wanted` to an existing one.

        Returns how many messages a new one begins with.

        Raises:
            ApiError: JetStream returned an error.
            ConfigError: the durable isn't a pull consumer with explicit acks.
        """
        own = {"durable_name": self.name, "filter_subject": self.subject}
        info, is_new = None, False
        try:
            info = await connection.ask(f"CONSUMER.INFO.{self.place}")
        except ApiError as error:
            if error.code != _NOT_FOUND:
                raise
            is_new = True
            policy = {"ack_policy": "explicit", "deliver_policy": "all"}
            config = {**policy, **default, **wanted, **own}
        else:
            config = info["config"]
            if config.get("deliver_subject") or config["ack_policy"] != "explicit":
                raise ConfigError(
                    f"NATS consumer {self.name!r} on stream {self.stream!r}: must be "
                    "a pull consumer with explicit acks; delete it, and it will be "
                    "recreated"
                )
            config = {**config, **wanted, **own}
        if info is None or config != info["config"]:
            info = await connection.ask(
                f"CONSUMER.DURABLE.CREATE.{self.place}",
                {"stream_name": self.stream, "config": config},
            )
        self.ack_wait = info["config"]["ack_wait"] / NANOSECONDS
        most = info["config"].get("max_deliver", -1)
        self.max_deliver = most if most > 0 else None
        return int(info.get("num_pending", 0)) if is_new else 0


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
