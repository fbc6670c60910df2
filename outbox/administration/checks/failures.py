"""Failures: of processes, messages waiting for a retry, dead letters, and jobs."""

from collections.abc import Iterator
from datetime import timedelta
from itertools import chain
from typing import Final

from pillarbox.outbox.administration.check import Finding, Severity, warning
from pillarbox.outbox.duration import exact_duration, write_duration
from pillarbox.outbox.logs.printable import count, for_shell
from pillarbox.outbox.observability.overview import Overview

_LATE: Final = timedelta(minutes=15)
_MANY: Final = 100


def check_failures(overview: Overview) -> Iterator[Finding]:
    """Find processes that fail now, and messages that have failed."""
    processes = overview.processes
    for it in chain(processes.relays, processes.consumers) if processes else ():
        if it.failing_since is not None:
            who = f"the {it.kind} {it.name} on {it.host}"
            yield warning(
                f"{who} has been failing for"
                f" {write_duration(overview.at - it.failing_since)}: {it.reason}",
                "read its log; if the reason names a message, run pillarbox trace ID;"
                f" otherwise check {it.broker} and the database",
            )
        if it.is_overdue(overview.at):
            yield warning(
                f"the consumer {it.name} on {it.host}: {it.running(overview.at)}",
                f"pillarbox trace {for_shell(it.running_id)}  # find out where the"
                " handler hangs, for example with py-spy dump, and restart it",
            )
    blocked = overview.blocked
    if blocked is not None and blocked.oldest:
        age = overview.at - blocked.oldest[0].created_at
        if age > _LATE:
            yield warning(
                f"messages are waiting for a retry: {blocked.summary}, the oldest"
                f" added {write_duration(age)} ago",
                "pillarbox blocked  # with the reasons",
            )
    for letters in overview.dead_letters:
        if letters.pending:
            more = "" if letters.is_complete else "more than "
            yield Finding(
                Severity.ERROR if letters.pending > _MANY else Severity.WARNING,
                f"{more}{count(letters.pending, 'pending dead letter')} in the"
                f" {letters.side}, {letters.new:,} of them new in the last"
                f" {exact_duration(letters.window)}",
                f"pillarbox dead-letters list --side {letters.side}"
                "  # then fix the cause, and retry or discard them",
            )
    for jobs in overview.jobs:
        if jobs.abandoned:
            yield warning(
                f"{count(jobs.abandoned, 'job')} of {jobs.consumer} without a worker:"
                " the worker died, and no other took over",
                f"start the consumer {jobs.consumer}; pillarbox jobs lists the jobs,"
                " and pillarbox cancel ID ends a job whose message the broker doesn't"
                " redeliver",
            )
