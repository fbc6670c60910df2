"""Shards: a topic that is published under several names, one for each hash of the key.

A key is always in the same shard, so each shard is in order on its own. Other programs
can read the names and compute them: shard 3 of 8 of `orders` is `orders.shard-3-of-8`.
"""

import re
from hashlib import sha256
from typing import Any, Final, NamedTuple, Self

from pillarbox.outbox.brokers.options import Form, option
from pillarbox.outbox.message import Message

MOST_SHARDS: Final = 64
_NAME: Final = re.compile(r"(.+)\.shard-([1-9][0-9]?)-of-([1-9][0-9]?)", re.DOTALL)


class Shard(NamedTuple):
    """A shard of a topic; the only one is named like the topic itself.

    Attributes:
        topic: the topic that handlers see.
        number: from 1.
        of: the number of shards in this layout of the topic.
    """

    topic: str
    number: int = 1
    of: int = 1

    @classmethod
    def named(cls, name: str) -> Self:
        """Return the shard that has this name; any other name is that of a topic."""
        if match := _NAME.fullmatch(name):
            number, of = int(match[2]), int(match[3])
            if number <= of and 1 < of <= MOST_SHARDS:
                return cls(match[1], number, of)
        return cls(name)

    @classmethod
    def holding(cls, message: Message, of: int) -> Self:
        """Return the shard of a message: by its key or, without one, by its id."""
        if of == 1 or message.key is None:
            return cls(message.topic, message.id.int % of + 1, of)
        digest = sha256(message.key.encode()).digest()
        return cls(message.topic, int.from_bytes(digest[:8]) % of + 1, of)

    @property
    def name(self) -> str:
        """The name under which it is published."""
        if self.of == 1:
            return self.topic
        return f"{self.topic}.shard-{self.number}-of-{self.of}"

    @property
    def all(self) -> list[Self]:
        """All shards of this layout."""
        return [self._replace(number=number + 1) for number in range(self.of)]


def shards_option() -> Any:
    """Declare the option for the number of shards of each topic."""
    return option(
        Form.number(1, MOST_SHARDS),
        1,
        side="relay",
        help="number of shards of each topic, so that several replicas can read it",
    )
