"""One batch on its way by single requests: keys side by side, each in its order."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias
from uuid import UUID

from outbox.errors import BrokerUnavailableError
from outbox.message import Message
from relay.host import Host
from relay.publisher import Confirmation, Nacked

Send: TypeAlias = Callable[[int], Awaitable[Confirmation | None]]
"""Sends the message of that place in the batch; None: the host is away."""

_MAX_TRIALS: Final = 3


class Round:
    """Sends what has no answer yet, one message of a key at a time.

    Args:
        answers: one for each message of the batch, filled in as they come.
        width: how many requests at once at most.
    """

    def __init__(
        self,
        batch: Sequence[Message],
        answers: list[Confirmation | None],
        host: Host,
        send: Send,
        *,
        width: int,
    ) -> None:
        self._answers = answers
        self._host = host
        self._send = send
        self._width = width
        self._lost: BrokerUnavailableError | None = None
        lines: dict[str | UUID, deque[int]] = {}
        for i, message in enumerate(batch):
            if answers[i] is None:
                name = message.id if message.key is None else message.key
                lines.setdefault(name, deque()).append(i)
        # Whose request failed lately goes last, lest it hold up all the others.
        self._lines = deque(
            sorted(lines.values(), key=lambda line: host.suspects(batch[line[0]].id))
        )

    async def run(self) -> None:
        """Send everything.

        Raises:
            BrokerUnavailableError: the host is away, and messages are left over.
        """
        await self._try_host()
        if self._lost is None and len(self._lines) == 1:
            await self._carry(self._lines.popleft())
        elif self._lost is None and self._lines:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._width, len(self._lines))):
                    group.create_task(self._carry_lines())
        if self._lost is not None and None in self._answers:
            raise self._lost

    async def _try_host(self) -> None:
        """Send one request at a time for as long as the host counts as away."""
        trials = 0
        while self._host.away is not None and self._lines and self._lost is None:
            line = self._lines.popleft()
            await self._carry_first(line)
            trials += 1
            if line:
                self._lines.append(line)
            if trials == _MAX_TRIALS and self._host.away is not None:
                self._lose()

    async def _carry_lines(self) -> None:
        while self._lines and self._lost is None:
            await self._carry(self._lines.popleft())

    async def _carry(self, line: deque[int]) -> None:
        while line and self._lost is None:
            await self._carry_first(line)
            if line and self._host.away is not None:
                self._lose()
        if self._host.away is not None:
            self._lose()

    async def _carry_first(self, line: deque[int]) -> None:
        i = line[0]
        answer = await self._send(i)
        if answer is None:
            self._lose()
            return
        line.popleft()
        self._answers[i] = answer
        if isinstance(answer, Nacked) and not answer.permanent:
            self._hold_back(line)

    def _hold_back(self, followers: deque[int]) -> None:
        for i in followers:
            self._answers[i] = Nacked("waits for a message of its key that was refused")
        followers.clear()

    def _lose(self) -> None:
        if self._lost is None:
            self._lost = self._host.error()
