"""The answers to the messages of a batch, and what a failed call had published."""

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Generic, TypeVar
from uuid import UUID

from pillarbox.outbox.bounded_dict import BoundedDict
from pillarbox.outbox.message import Message
from pillarbox.relay.publisher import Acked, Confirmation, Nacked

A = TypeVar("A")

_MAX_AGE: Final = 300.0
_BEHIND: Final = Nacked("waiting behind a refused message of its key")


class Answers(Generic[A]):
    """One answer for each message of a batch. For one event loop.

    Args:
        batch: the messages.
        given: the answers to those that aren't to be sent, and None for the others.

    Attributes:
        given: the answer to each message; None: there is none yet.
        missing: the indexes of messages that were sent and have no answer.
        done: completes once none is missing, or with the error that `fail` was given.
    """

    def __init__(self, batch: Sequence[Message], given: Iterable[A | None]) -> None:
        self.batch = batch
        self.given: list[A | Confirmation | None] = list(given)
        self.expect(())

    @property
    def left(self) -> list[int]:
        """The indexes of messages without an answer, in order."""
        return [i for i, answer in enumerate(self.given) if answer is None]

    def hold_back(self) -> list[int]:
        """Nack messages behind a refused one of their key; return those left."""
        refused: set[str] = set()
        for i, message in enumerate(self.batch):
            if self.given[i] is None and message.key in refused:
                self.given[i] = _BEHIND
            answer = self.given[i]
            is_refused = isinstance(answer, Nacked) and not answer.permanent
            if is_refused and message.key is not None:
                refused.add(message.key)
        return self.left

    def expect(self, indexes: Iterable[int]) -> None:
        """Let `done` complete once these messages, which are sent now, have answers."""
        self.missing = set(indexes)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def give(self, index: int, answer: A | Confirmation) -> None:
        """Record the answer to one message."""
        self.given[index] = answer
        self.missing.discard(index)
        if not self.missing and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        """Let `done` raise an error: no more answers will arrive."""
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # retrieved, or asyncio would log it

    def complete(self) -> list[A | Confirmation]:
        """Return all answers."""
        answers = [answer for answer in self.given if answer is not None]
        assert len(answers) == len(self.batch), "a message without an answer"
        return answers


class PublishedIds:
    """The ids of messages that the broker confirmed in a call that raised.

    A batch sent as several requests can fail halfway. The messages confirmed by then
    needn't be sent again when the relay retries the batch. Each id is remembered for at
    most five minutes, until it is looked up.
    """

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
