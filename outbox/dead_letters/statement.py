"""The SQL statements for dead letters, in the schema of either side."""

from enum import StrEnum
from typing import Literal, LiteralString, TypeAlias

from pillarbox.outbox.postgres.sql_files import load

Schema: TypeAlias = Literal["outbox", "inbox"]


class Statement(StrEnum):
    """The files in `outbox/sql` with a placeholder for the schema.

    Those that also have the placeholder `{selected}` read from `select_dead_letters`,
    so that listing, counting and retrying select the same dead letters.
    """

    LIST = "list_dead_letters"
    GROUP = "group_dead_letters"
    FIND = "find_dead_letters"
    LEASE_DUE = "lease_due_dead_letters"
    READ_SUMMARY = "read_dead_letter_summary"
    READ = "read_dead_letter"
    LOCK = "lock_dead_letter"
    MARK_SUCCEEDED = "mark_succeeded"
    MARK_PENDING = "mark_pending"
    MARK_DISCARDED = "mark_discarded"


def statement(schema: Schema, name: Statement) -> LiteralString:
    """Return a statement for one schema."""
    selected = load("outbox", "select_dead_letters")
    return (
        load("outbox", name).replace("{selected}", selected).replace("{schema}", schema)
    )
