"""From a topic to its handler."""

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox.errors import ConfigError, shorten
from outbox.message import Message

SyncHandler: TypeAlias = Callable[[Session, Message], object]
AsyncHandler: TypeAlias = Callable[[AsyncSession, Message], Awaitable[object]]
Handler: TypeAlias = SyncHandler | AsyncHandler


class Routes:
    """One handler for each topic or beginning of topics (`orders.*`)."""

    def __init__(self) -> None:
        self._exact: dict[str, Handler] = {}
        self._prefixes: dict[str, Handler] = {}

    @property
    def topics(self) -> tuple[str, ...]:
        """What to subscribe to, as it was registered."""
        return (*self._exact, *(f"{prefix}*" for prefix in self._prefixes))

    def add(self, topic: str, handler: Handler) -> None:
        """Register a handler.

        Raises:
            ConfigError: the topic can't be used, or has a handler already.
        """
        check_topic(topic)
        kind = self._prefixes if topic.endswith("*") else self._exact
        name = topic.removesuffix("*")
        if name in kind:
            raise ConfigError(
                f"topic {shorten(topic)}: has the handler {name_of(kind[name])} "
                f"already, and can't have {name_of(handler)} too; let one call both"
            )
        kind[name] = handler

    def find(self, topic: str) -> Handler | None:
        """Give the handler of exactly this topic, or of its longest beginning."""
        if topic in self._exact:
            return self._exact[topic]
        matching = [prefix for prefix in self._prefixes if topic.startswith(prefix)]
        return self._prefixes[max(matching, key=len)] if matching else None


def check_topic(topic: object) -> None:
    """Refuse what can't be subscribed to.

    Raises:
        ConfigError: it is empty, no text, or has a star elsewhere than at its end.
    """
    if not isinstance(topic, str) or not topic or "*" in topic[:-1]:
        raise ConfigError(
            f"topic {shorten(topic)}: write a topic, or the beginning of topics "
            "followed by one * (orders.*)"
        )


def name_of(handler: Handler) -> str:
    """Name a handler for an error message."""
    return getattr(handler, "__qualname__", None) or repr(handler)
