"""Retention: overdue partitions, what holds them, and who else may drop partitions."""

from collections.abc import Iterator
from typing import Final

from pillarbox.outbox.administration.check import Finding, Installation, warning
from pillarbox.outbox.administration.checks.by_statement import by_statement
from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.administration.retention import read_policies
from pillarbox.outbox.duration import exact_duration
from pillarbox.outbox.limits import Limits
from pillarbox.outbox.postgres.sql_files import load
from pillarbox.outbox.retry import RetryPolicy

KEPT_FOR_LATE_MESSAGES: Final = ("inbox.receipt", "inbox.job")
"""Tables in which a message needs the day of its id, however late it arrives."""
MINIMUM_RETENTION: Final = Limits().max_delay + 2 * RetryPolicy().longest
"""The longest time after which a message can still reach its consumer, by default.

It may wait for its `available_at`, and be retried by the relay and by the consumer.
"""


def check_retention(
    connection: AdministrationConnection, here: Installation
) -> Iterator[Finding]:
    """Find partitions past their retention, and retentions that are too short."""
    yield from by_statement(load("outbox", "check_late_partitions"))(connection, here)
    for policy in read_policies(connection):
        if (
            policy.parent_table in KEPT_FOR_LATE_MESSAGES
            and policy.retention < MINIMUM_RETENTION
        ):
            yield warning(
                f"{policy.parent_table} is kept for"
                f" {exact_duration(policy.retention)}, but with the default delays"
                " and retries a message can arrive up to"
                f" {exact_duration(MINIMUM_RETENTION)} late",
                f"pillarbox retention set {policy.parent_table} 14d",
            )
