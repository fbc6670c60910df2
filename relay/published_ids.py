"""The ids of messages that the broker confirmed in a call that raised.

A batch sent as several requests can fail halfway. The messages confirmed by then
needn't be sent again when the relay retries the batch.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from uuid import UUID

from outbox.bounded_dict import BoundedDict
from relay.answers import Answers
from relay.publisher import Acked

_MAX_AGE: Final = 300.0


class PublishedIds:
    """Remembers ids for at most five minutes, each until it is looked up."""

    def __init__(self) -> None:
        self._published_at: BoundedDict[UUID, float] = BoundedDict()

    @contextmanager
    def kept(self, answers: Answers[Any]) -> Iterator[None]:
        """If the block raises, remember what was acked until then."""
        try:
            yield
        except BaseException:
            for message, answer in zip(answers.batch, answers.given, strict=True):
                if isinstance(answer, Acked):
                    self._published_at[message.id] = time.monotonic()
            raise

    def pop(self, id: UUID) -> bool:
        """Return whether a message was published recently, and forget it."""
        published_at = self._published_at.pop(id, None)
        return published_at is not None and time.monotonic() - published_at < _MAX_AGE
