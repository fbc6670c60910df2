"""Dead letters of both sides: one table layout, one implementation.

`letter` defines what is stored about a message that was dead-lettered. `criteria`
selects dead letters, `inspect` lists, shows and discards them. `retry` retries them
with a `Retrier`: the relay's publishes, the inbox's calls the handler. `schedule` does
so at fixed times. The commands are in
`outbox.cli.dead_letters`.
"""

from outbox.dead_letters.criteria import Criteria
from outbox.dead_letters.letter import MAX_SHORT, SHORTENED, Letter, Status, Summary
from outbox.dead_letters.retry import (
    Candidate,
    Failure,
    Outcome,
    Retrier,
    RetryCounts,
    outcome_event,
)
from outbox.dead_letters.schedule import RetrySchedule, Scheduler
from outbox.dead_letters.statement import Schema, Statement, statement

__all__ = [
    "MAX_SHORT",
    "SHORTENED",
    "Candidate",
    "Criteria",
    "Failure",
    "Letter",
    "Outcome",
    "Retrier",
    "RetryCounts",
    "RetrySchedule",
    "Scheduler",
    "Schema",
    "Statement",
    "Status",
    "Summary",
    "outcome_event",
    "statement",
]
