"""How late a message can arrive, and the tables that must keep its day until then."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from outbox.events import Event
from outbox.limits import Limits
from outbox.postgres.sql_files import load
from outbox.retry import RetryPolicy

KEPT_FOR_LATE_MESSAGES: Final = ("inbox.receipt", "inbox.job")
"""Tables in which a message needs the day of its id, however late it arrives."""
LIST_MINIMUMS: Final = load("outbox", "list_minimums")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionTooShort(Event):
    """The retries of this process can last longer than a table's minimum retention.

    Attributes:
        table: the table, whose days would be dropped too early.
        minimum: its minimum retention.
        needed: how long the retries may take.
        remedy: the command that raises it.
    """

    level = logging.WARNING

    table: str
    minimum: timedelta
    needed: timedelta
    remedy: str


def minimum_retention(retry: RetryPolicy | None = None) -> timedelta:
    """Return the longest time after which a message can still reach its consumer.

    A receipt, plain or leased, is stored in the day on which its message was added.
    From then on the message may wait for its `available_at`, be retried by the relay,
    and be retried by the consumer.

    Args:
        retry: the policy of the relay or the consumer; the defaults apply to everything
            else.
    """
    usual = RetryPolicy()
    return Limits().max_delay + usual.longest + (retry or usual).longest


def find_short_retention(
    retry: RetryPolicy, minimums: Iterable[tuple[str, float, float]]
) -> Iterator[RetentionTooShort]:
    """Compare the retries of a relay or a consumer with the rows of `LIST_MINIMUMS`.

    Retries no longer than the default's are never reported: the lower minimum was
    chosen on purpose.
    """
    if retry.longest <= RetryPolicy().longest:
        return
    needed = minimum_retention(retry)
    for table, *seconds in minimums:
        minimum, retention = (timedelta(seconds=each) for each in seconds)
        if needed > minimum:
            days = needed // timedelta(days=1) + 1
            longer = f" {days}d" if retention < timedelta(days=days) else ""
            yield RetentionTooShort(
                table=table,
                minimum=minimum,
                needed=needed,
                remedy=f"pillarbox retention set {table}{longer} --minimum {days}d",
            )
