"""An application that adds numbered messages, transaction by transaction."""

from types import TracebackType
from typing import Self

from sqlalchemy import create_engine
from sqlalchemy.orm import Session

import pillarbox
from pillarbox.outbox.message import Message
from pillarbox.outbox.postgres.connection import sqlalchemy_url

_IN_A_TRANSACTION = 500


class Writer:
    """Adds messages 0, 1, 2, … of each key, with the privileges of an application."""

    def __init__(self, url: str, *, keys: int = 40) -> None:
        role = {"options": "-c role=pillarbox_application"}
        self._engine = create_engine(sqlalchemy_url(url), connect_args=role)
        self._keys = keys
        self.added = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._engine.dispose()

    def add(self, count: int) -> None:
        """Commit `count` more messages."""
        end = self.added + count
        while self.added < end:
            upto = min(end, self.added + _IN_A_TRANSACTION)
            with Session(self._engine) as session, session.begin():
                pillarbox.add(
                    session,
                    *(self._message(n) for n in range(self.added, upto)),
                )
            self.added = upto

    def reconnect(self) -> None:
        """Discard the connections that a restart has broken."""
        self._engine.dispose()

    def numbers(self) -> dict[str, list[int]]:
        """Return the numbers that a sink must contain once all have arrived."""
        rounds, more = divmod(self.added, self._keys)
        return {
            f"key-{key}": list(range(rounds + (key < more)))
            for key in range(self._keys)
            if rounds or key < more
        }

    def _message(self, position: int) -> Message:
        number, key = divmod(position, self._keys)
        return Message("numbers.counted", b"%d" % number, key=f"key-{key}")
