"""Sends a batch as single requests: keys in parallel, messages of a key in order."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias
from uuid import UUID

from pillarbox.outbox.errors import BrokerUnavailableError
from pillarbox.relay.answers import Answers
from pillarbox.relay.publisher import Confirmation, Nacked
from pillarbox.relay.publishers.http.host import Host

Send: TypeAlias = Callable[[int], Awaitable[Confirmation | None]]
"""Sends the message at an index of the batch; None if the host is unavailable."""

_MAX_TRIALS: Final = 3


class Batch:
    """Sends the messages without an answer, one at a time for each key.

    Args:
        answers: those of the batch, filled in as they arrive.
        width: maximum number of concurrent requests.
    """

    def __init__(
        self,
        answers: Answers[Confirmation],
        host: Host,
        send: Send,
        *,
        width: int,
    ) -> None:
        self._batch = answers.batch
        self._answers = answers
        self._host = host
        self._send = send
        self._width = width
        self._lost: BrokerUnavailableError | None = None
        self._refused: list[int] = []
        # The host was unavailable and has answered since, so refusals concern the
        # message.
        self._proven = False
        lines: dict[str | UUID, deque[int]] = {}
        for i in answers.left:
            message = self._batch[i]
            name = message.id if message.key is None else message.key
            lines.setdefault(name, deque()).append(i)
        # Messages whose requests failed recently go last, so that others don't wait.
        self._lines = deque(
            sorted(
                lines.values(), key=lambda line: host.suspects(self._batch[line[0]].id)
            )
        )

    async def run(self) -> None:
        """Send all messages without an answer.

        Raises:
            BrokerUnavailableError: the host is unavailable, and some messages have no
                answer.
        """
        await self._try_host()
        if self._lost is None and len(self._lines) == 1:
            await self._carry(self._lines.popleft())
        elif self._lost is None and self._lines:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._width, len(self._lines))):
                    group.create_task(self._carry_lines())
        self._take_back()
        if self._answers.hold_back() and self._lost is not None:
            raise self._lost
        for i in self._refused:
            self._host.forget(self._batch[i].id)

    async def _try_host(self) -> None:
        """Send one request at a time while the host counts as unavailable."""
        was_away = self._host.away is not None
        trials = 0
        while self._lines and self._host.away is not None and self._lost is None:
            if trials == _MAX_TRIALS:
                self._lose()
                return
            line = self._lines.popleft()
            i = line[0]
            await self._carry_first(line)
            if line:
                self._lines.append(line)
            # A failure caused by the message itself says nothing about the host.
            trials += not self._host.blames(self._batch[i].id)
        if self._host.away is not None:
            self._lose()
        self._proven = was_away and self._host.away is None

    async def _carry_lines(self) -> None:
        while self._lines and self._lost is None:
            await self._carry(self._lines.popleft())

    async def _carry(self, line: deque[int]) -> None:
        while line and self._lost is None:
            await self._carry_first(line)
            if self._host.away is not None and not self._proven:
                self._lose()

    async def _carry_first(self, line: deque[int]) -> None:
        i = line.popleft()
        answer = self._answers.given[i] = await self._send(i)
        if answer is None:
            self._lose()
        elif isinstance(answer, Nacked) and not answer.permanent:
            self._refused.append(i)
            line.clear()

    def _take_back(self) -> None:
        """Discard the refusals of a host that turned out to be unavailable."""
        if self._lost is None or self._proven:
            return
        for i in self._refused:
            if not self._host.blames(self._batch[i].id):
                self._answers.given[i] = None

    def _lose(self) -> None:
        if self._lost is None:
            self._lost = self._host.error()
