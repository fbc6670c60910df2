"""The durable pull consumers of JetStream, and the deliveries that come of them.

A consumer of ours has one durable for each of its topics on each stream: servers
before 2.10 filter by one subject only, and so no replica ever gets a topic that it
has no handler for. Names and answers are those of JetStream's API.
"""

import json
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

from nats.aio.msg import Msg

from outbox.errors import ConfigError, InvalidMessageError, shorten
from outbox.message import Message
from outbox.nats import ApiError, NatsConnection
from outbox.nats_message import decode_message, plain_headers, subject_problem

NANOSECONDS: Final = 1_000_000_000
_NOT_FOUND: Final = 404
_ACK: Final = "$JS.ACK."
_SHORT_ACK: Final = 9
_GRACE: Final = 5.0
# The pull ended without, or with fewer, messages.
_ENDED: Final = frozenset({"404", "408"})
_MAX_SLUG: Final = 60


@dataclass(eq=False, slots=True)
class Entry:
    """A delivery as it was read, with what is wrong with it if anything is."""

    stream: str
    sequence: int
    reply: str
    message: Message
    problem: str | None
    attempts: int = 0


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
        """Where it is, as JetStream's subjects say it."""
        return f"{self.stream}.{self.name}"

    async def join(
        self,
        connection: NatsConnection,
        wanted: Mapping[str, Any],
        default: Mapping[str, Any],
    ) -> None:
        """Make it, or bring one that is there to what is wanted.

        Raises:
            ApiError: JetStream refuses.
            ConfigError: it is none that can be pulled from and acked one by one.
        """
        own = {"durable_name": self.name, "filter_subject": self.subject}
        try:
            info = await connection.ask(f"CONSUMER.INFO.{self.place}")
        except ApiError as error:
            if error.code != _NOT_FOUND:
                raise
            policy = {"ack_policy": "explicit", "deliver_policy": "all"}
            config = {**policy, **default, **wanted, **own}
        else:
            config = info["config"]
            if config.get("deliver_subject") or config["ack_policy"] != "explicit":
                raise ConfigError(
                    f"NATS consumer {self.name!r} on stream {self.stream!r}: must be "
                    "a pull consumer with explicit acks; delete it, and it is made"
                )
            if {**wanted, **own}.items() <= config.items():
                self._read(config)
                return
            config = {**config, **wanted, **own}
        info = await connection.ask(
            f"CONSUMER.DURABLE.CREATE.{self.place}",
            {"stream_name": self.stream, "config": config},
        )
        self._read(info["config"])

    def _read(self, config: Mapping[str, Any]) -> None:
        self.ack_wait = config["ack_wait"] / NANOSECONDS
        most = config.get("max_deliver", -1)
        self.max_deliver = most if most > 0 else None
        self.outstanding = 0


class Pulls:
    """The open pulls of one connection on the durables of a consumer."""

    def __init__(
        self, connection: NatsConnection, api: str, durables: Collection[Durable]
    ) -> None:
        self.connection = connection
        self._api = api
        self._inbox = f"{connection.client.new_inbox()}."
        self._durables = {durable.place: durable for durable in durables}

    @property
    def ack_wait(self) -> float:
        """The shortest of the durables', in seconds."""
        return min(durable.ack_wait for durable in self._durables.values())

    @property
    def is_open(self) -> bool:
        """Whether something can still come."""
        return self.connection.lost is None and any(
            durable.outstanding > 0 for durable in self._durables.values()
        )

    @property
    def is_overdue(self) -> bool:
        """Whether JetStream owes us the end of a pull."""
        latest = time.monotonic() - _GRACE
        return any(
            durable.outstanding > 0 and durable.ends_at < latest
            for durable in self._durables.values()
        )

    async def listen(self, heard: Callable[[Msg], Awaitable[None]]) -> None:
        """Have `heard` called with what comes, in its order."""
        await self.connection.client.subscribe(
            f"{self._inbox}>", cb=heard, pending_bytes_limit=0
        )

    async def ask(self, limit: int, wait: float) -> None:
        """Pull from each durable on which no pull is open."""
        request = {"batch": limit, "expires": int(wait * NANOSECONDS)}
        for place, durable in self._durables.items():
            if durable.outstanding > 0:
                continue
            durable.outstanding = limit
            durable.ends_at = time.monotonic() + wait
            await self.connection.client.publish(
                f"{self._api}.CONSUMER.MSG.NEXT.{place}",
                json.dumps(request).encode(),
                f"{self._inbox}{place}",
            )

    async def read(self, got: Msg) -> Entry | None:
        """Read a message of a stream; None for JetStream's own word about a pull."""
        if not got.reply.startswith(_ACK):
            await self._end(got)
            return None
        tokens = got.reply.split(".")
        # Newer servers put the domain and the account before the stream.
        first = 2 if len(tokens) == _SHORT_ACK else 4
        stream, name, delivered, sequence = tokens[first : first + 4]
        durable = self._durables[f"{stream}.{name}"]
        durable.outstanding -= 1
        headers = got.headers or {}
        problem = None
        try:
            message = decode_message(headers, got.data)
        except InvalidMessageError as error:
            message = Message(got.subject, got.data, headers=plain_headers(headers))
            problem = str(error)
        if durable.max_deliver is not None and int(delivered) >= durable.max_deliver:
            problem = problem or (
                f"was handed over {delivered} times without an outcome, and NATS "
                "would not hand it over again (max_deliver)"
            )
        return Entry(stream, int(sequence), got.reply, message, problem)

    async def _end(self, got: Msg) -> None:
        place = got.subject.removeprefix(self._inbox)
        if place in self._durables:
            self._durables[place].outstanding = 0
        headers = got.headers or {}
        if headers.get("Status") not in _ENDED:
            said = headers.get("Description") or f"{place} is gone"
            await self.connection.drop(f"it ended the pull: {said}")


async def give_back(
    connection: NatsConnection, entries: Iterable[tuple[Entry, float]]
) -> None:
    """Have entries handed over again, each after so many seconds, in their order."""
    for entry, delay in entries:
        word = b"-NAK"
        if delay:
            word += b' {"delay": %d}' % int(delay * NANOSECONDS)
        await connection.client.publish(entry.reply, word)
    await connection.flush()


async def find_durables(
    connection: NatsConnection,
    consumer: str,
    topics: Collection[str],
    stream: str | None,
) -> list[Durable]:
    """Give the durables of a consumer's topics, on one stream or wherever they are.

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
    """Give the subjects of topics, without those that others cover.

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
    """Name the durable of a subject: readable, and different for each subject."""
    readable = re.sub(r"[^A-Za-z0-9-]+", "_", subject.removesuffix(".>"))[:_MAX_SLUG]
    return f"{consumer}_{readable}_{sha256(subject.encode()).hexdigest()[:8]}"
