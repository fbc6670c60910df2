"""List, read and discard dead letters, on behalf of a person."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final, TypeAlias
from uuid import UUID

from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.dead_letters.criteria import Criteria, ListPosition
from pillarbox.outbox.dead_letters.letter import Letter, Summary
from pillarbox.outbox.dead_letters.retry import Candidate
from pillarbox.outbox.dead_letters.statement import Schema, Statement, statement
from pillarbox.outbox.errors import ConfigError

_PAGE: Final = 1000

OnDiscard: TypeAlias = Callable[[AdministrationConnection, str, str], None]
"""Called in the transaction of each discard, with message id and origin.

It may raise `ConfigError` to refuse the discard.
"""


class DeadLetterTable:
    """The dead letters of one side, on a connection in autocommit mode."""

    def __init__(
        self,
        connection: AdministrationConnection,
        schema: Schema,
        on_discard: OnDiscard | None = None,
    ) -> None:
        self._connection = connection
        self._schema: Schema = schema
        self._on_discard = on_discard

    def summaries(self, criteria: Criteria) -> list[Summary]:
        """Return the dead letters that match the criteria, newest first."""
        cursor = self._connection.execute(
            statement(self._schema, Statement.LIST), criteria.parameters()
        )
        return [Summary.of(row) for row in cursor]

    def find(self, criteria: Criteria) -> list[Candidate]:
        """Find the dead letters that match the criteria, oldest first."""
        cursor = self._connection.execute(
            statement(self._schema, Statement.FIND), criteria.parameters()
        )
        return [Candidate(*row) for row in cursor]

    def oldest_first(self, criteria: Criteria) -> Iterator[Candidate]:
        """Find the same dead letters, and hold only a page of them."""
        after: ListPosition | None = None
        while page := self.find(replace(criteria, after=after, max_rows=_PAGE)):
            yield from page
            after = ListPosition(page[-1].created_at, page[-1].id)

    def read(self, id: UUID) -> Letter:
        """Return a dead letter with all its fields.

        Raises:
            ConfigError: no dead letter has this id.
        """
        row = self._connection.execute(
            statement(self._schema, Statement.READ), {"id": id}
        ).fetchone()
        if row is None:
            raise ConfigError(
                f"dead letter {id}: not found in {self._schema}.dead_letter; list "
                "shows them"
            )
        return Letter.of(row)

    def discard(
        self, candidates: Sequence[Candidate], reason: str, person: str | None = None
    ) -> int:
        """Discard PENDING dead letters, each in a transaction; return their number.

        Waits for a dead letter that is being retried.

        Args:
            person: the person on whose behalf, recorded in addition to the login.

        Raises:
            ConfigError: `on_discard` refused some; the others were discarded.
        """
        discarded = 0
        refusals: list[ConfigError] = []
        for candidate in candidates:
            try:
                discarded += self._discard(candidate, reason, person)
            except ConfigError as refusal:
                refusals.append(refusal)
        if refusals:
            raise ConfigError(
                f"{discarded} discarded, {len(refusals)} not: {refusals[0]}"
            )
        return discarded

    def _discard(self, candidate: Candidate, reason: str, person: str | None) -> bool:
        with self._connection.transaction():
            row = self._connection.execute(
                statement(self._schema, Statement.MARK_DISCARDED),
                {**candidate.parameters(), "reason": reason, "person": person},
            ).fetchone()
            if row is not None and self._on_discard is not None:
                self._on_discard(self._connection, *row)
        return row is not None
