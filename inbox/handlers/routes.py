"""Find the handler and the queue of a topic."""

import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, Generic, TypeAlias, TypeVar

from sqlalchemy.orm import Session

from pillarbox.outbox.errors import ConfigError, shorten
from pillarbox.outbox.message import Message

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

Handler: TypeAlias = (
    Callable[[Session, Message], object]
    | Callable[["AsyncSession", Message], Awaitable[object]]
)
H = TypeVar("H")

DEFAULT_QUEUE: Final = "default"
_QUEUE: Final = re.compile(r"[A-Za-z0-9_]+(-[A-Za-z0-9_]+)*")


class Routes(Generic[H]):
    """One handler for each topic or prefix (`orders.*`)."""

    def __init__(self) -> None:
        self._exact: dict[str, H] = {}
        self._prefixes: dict[str, H] = {}
        self._queues: dict[str, str] = {}

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics to subscribe to, as registered."""
        return (*self._exact, *(f"{prefix}*" for prefix in self._prefixes))

    @property
    def handlers(self) -> tuple[H, ...]:
        """The handlers, in the order of their topics."""
        return (*self._exact.values(), *self._prefixes.values())

    @property
    def queues(self) -> dict[str, list[str]]:
        """The topics of each queue."""
        queues: dict[str, list[str]] = {}
        for topic in self.topics:
            queues.setdefault(self._queues[topic], []).append(topic)
        return queues

    def add(self, topic: str, handler: H, queue: str = DEFAULT_QUEUE) -> None:
        """Register a handler.

        Raises:
            ConfigError: the topic or the queue is invalid, the topic already has a
                handler, or it would be in two queues.
        """
        check_topic(topic)
        check_queue(queue)
        kind = self._prefixes if topic.endswith("*") else self._exact
        name = topic.removesuffix("*")
        if name in kind:
            raise ConfigError(
                f"topic {shorten(topic)}: already handled by {name_of(kind[name])}:"
                f" one handler per topic; call {name_of(handler)} from it"
            )
        for other, its_queue in self._queues.items():
            if its_queue != queue and overlap(topic, other):
                raise ConfigError(
                    f"topic {shorten(topic)} in queue {queue!r}: overlaps"
                    f" {shorten(other)} in queue {its_queue!r}, so messages of both"
                    " topics would arrive twice; use one queue for both"
                )
        kind[name] = handler
        self._queues[topic] = queue

    def find(self, topic: str) -> H | None:
        """Return the handler of this topic, or of the longest matching prefix."""
        known = self.match(topic)
        if known is None:
            return None
        return self._prefixes[known[:-1]] if known.endswith("*") else self._exact[known]

    def queue_of(self, topic: str) -> str | None:
        """Return the queue of a topic; None if no handler takes it."""
        known = self.match(topic)
        return None if known is None else self._queues[known]

    def match(self, topic: str) -> str | None:
        """Return the topic or prefix whose handler takes a topic; None: none does."""
        if topic in self._exact:
            return topic
        matching = [prefix for prefix in self._prefixes if topic.startswith(prefix)]
        return f"{max(matching, key=len)}*" if matching else None


def check_topic(topic: object) -> None:
    """Refuse a topic that can't be subscribed to.

    Raises:
        ConfigError: it is empty, not a string, or has a star before its end.
    """
    if callable(topic):
        raise ConfigError(
            f"topic {name_of(topic)}: is a function; pass the topic first, "
            '@consumer.handles("orders.placed")'
        )
    if not isinstance(topic, str) or not topic or "*" in topic[:-1]:
        raise ConfigError(
            f"topic {shorten(topic)}: write a topic, or a prefix followed by one *"
            " (orders.*)"
        )


def check_queue(queue: object) -> None:
    """Refuse a queue name that not every broker allows in a consumer group.

    Raises:
        ConfigError: it contains characters that aren't allowed.
    """
    if not isinstance(queue, str) or not _QUEUE.fullmatch(queue):
        raise ConfigError(
            f"queue {shorten(queue)}: use letters, digits, _ and single - in between"
        )


def overlap(topic: str, other: str) -> bool:
    """Return whether two topics or prefixes have messages in common."""
    one, two = topic.removesuffix("*"), other.removesuffix("*")
    return (topic.endswith("*") and two.startswith(one)) or (
        other.endswith("*") and one.startswith(two)
    )


def name_of(handler: object) -> str:
    """Return a handler's name, for error messages."""
    return getattr(handler, "__qualname__", None) or repr(handler)
