"""The answers to the messages of a batch, collected as they arrive."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final, Generic, TypeVar

from outbox.message import Message
from relay.publisher import Confirmation, Nacked

A = TypeVar("A")

_BEHIND: Final = Nacked("it waits behind a refused message of its key")


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
