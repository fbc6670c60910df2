"""The queues that a process serves: their weights, order and sources."""

from collections.abc import Iterable, Mapping
from typing import Final, Literal, TypeAlias

from pillarbox.inbox.handlers.registration import Registered
from pillarbox.inbox.handlers.routes import DEFAULT_QUEUE, Routes
from pillarbox.inbox.source import Source
from pillarbox.outbox.brokers.options import identity_of
from pillarbox.outbox.brokers.plugins import implementation
from pillarbox.outbox.errors import ConfigError, check_type, shorten
from pillarbox.outbox.message import FrozenDict

Order: TypeAlias = Literal["key", "none"]
ORDERS: Final = ("key", "none")


class ServedQueues:
    """The queues that a consumer serves, checked against its handlers when it runs.

    Args:
        source: a broker's URL, the source of the only queue, or one source for each
            queue.
    """

    def __init__(
        self,
        consumer: str,
        routes: Routes[Registered],
        source: Source | str | Mapping[str, Source],
    ) -> None:
        self._consumer = consumer
        self._routes = routes
        self._source = FrozenDict(source) if isinstance(source, Mapping) else source
        self._weights: dict[str, int] = {}

    def choose(self, queues: Mapping[str, int]) -> None:
        """Serve only these queues, with these weights.

        Raises:
            ConfigError: no queue is given, or a weight isn't a positive number.
        """
        check_type("queues", queues, Mapping, "pass a dict of names to weights")
        if not queues:
            raise ConfigError("queues={}: name at least one queue, or omit queues")
        for queue, weight in queues.items():
            if type(weight) is not int or weight < 1:
                raise ConfigError(
                    f"weight {shorten(weight)} of queue {shorten(queue)}: must be a "
                    "whole number, at least 1"
                )
        self._weights = dict(queues)

    def weights(self) -> dict[str, int]:
        """Return the chosen weights; by default, equal weights for all queues.

        Raises:
            ConfigError: a queue was named for which no handler is registered.
        """
        known = self._routes.queues
        named = {"queue": self._weights}
        if isinstance(self._source, Mapping):
            named["source of queue"] = dict.fromkeys(self._source, 1)
        for field, queues in named.items():
            for queue in queues:
                if queue not in known:
                    raise ConfigError(
                        f"consumer {self._consumer!r}: {field} {shorten(queue)}: no"
                        " handler uses this queue; known queues:"
                        f" {', '.join(sorted(known))}"
                    )
        return self._weights or dict.fromkeys(known, 1)

    def broker(self, systems: Iterable[str]) -> str:
        """Return the broker without credentials, or the names of these systems."""
        if isinstance(self._source, str):
            return identity_of(self._source)
        return ", ".join(sorted({*systems}))

    def source_of(self, queue: str) -> Source:
        """Create or find the source of a queue.

        Raises:
            ConfigError: the queue has no source, or it can't be created.
        """
        if isinstance(self._source, str):
            found = implementation("pillarbox.sources", self._source)
            made: Source = found(
                self._source,
                consumer=group_of(self._consumer, queue),
                topics=self._routes.queues[queue],
            )
            return made
        if not isinstance(self._source, Mapping):
            if len(self._routes.queues) == 1:
                return self._source
        elif queue in self._source:
            return self._source[queue]
        raise ConfigError(
            f"consumer {self._consumer!r}: has no source for queue {queue!r}; pass a "
            "URL, or a mapping with a source for each queue"
        )


def group_of(consumer: str, queue: str) -> str:
    """Name the consumer group of a queue.

    The separator consists of hyphens because NATS allows no dots, and of two hyphens so
    that the name doesn't match another consumer's by accident.
    """
    return consumer if queue == DEFAULT_QUEUE else f"{consumer}--{queue}"
