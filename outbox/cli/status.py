"""`pillarbox status`: whether all is well, and what waits, fails and runs."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from outbox.administration.check import Finding, Severity, status_of
from outbox.administration.connection import administration
from outbox.administration.doctor import examine_quickly
from outbox.cli.command import (
    Database,
    Json,
    command,
    database_url,
    new_app,
)
from outbox.cli.output import lines_of, write_json, write_line, write_table
from outbox.duration import brief_duration, exact_duration, write_duration
from outbox.logs.printable import count
from outbox.observability.measures.backlog import Backlog, BacklogGroup, Rate
from outbox.observability.measures.processes import Process
from outbox.observability.overview import Overview

APPLICATION_NAME: Final = "pillarbox status"
"""The application_name of its session in `pg_stat_activity`."""

app = new_app()


@command(
    app,
    epilog="Exit status: 0 all well, 1 warnings, 3 errors, 4 no error, but a part "
    "couldn't be measured, 2 nothing could be measured. Of the inbox's messages, those "
    "of the postgres broker are shown; other brokers know what waits there. A consumer "
    "is shown in the database of its handlers.",
)
def status(*, database: Database = None, json: Json = False) -> int:
    """Show whether all is well, and what waits, fails and runs, on one screen."""
    url = database_url(database)
    with administration(url, application_name=APPLICATION_NAME) as connection:
        connection.execute("SET timezone = 'UTC'")
        overview, findings = examine_quickly(connection)
    code = status_of(findings)
    if json:
        of_findings = [asdict(finding) for finding in findings]
        write_json({"status": code, **asdict(overview), "findings": of_findings})
        return code
    for block in _blocks(overview, findings):
        if isinstance(block, _Table):
            write_line("")
            write_table(block.columns, block.rows)
        else:
            write_line(block)
    return code


class _Table(NamedTuple):
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


def _blocks(overview: Overview, findings: Sequence[Finding]) -> Iterator[str | _Table]:
    yield from _answer(overview, findings)
    yield ""
    yield from _outbox(overview)
    yield from _blocked(overview)
    yield from _processes(overview)
    yield from _consumers(overview)
    yield from _letters(overview)
    yield from _tables(overview)
    yield ""
    yield from _upkeep(overview)


def _answer(overview: Overview, findings: Sequence[Finding]) -> Iterator[str]:
    moment = f"{overview.database} at {overview.at:%F %T} UTC"
    counts = [
        (sum(it.severity is severity for it in findings), one, many)
        for severity, one, many in (
            (Severity.ERROR, "error", "errors"),
            (Severity.WARNING, "warning", "warnings"),
            (Severity.UNKNOWN, "part unknown", "parts unknown"),
        )
    ]
    bad = ", ".join(
        f"{count} {one if count == 1 else many}" for count, one, many in counts if count
    )
    yield f"{bad or 'all well'}: {moment}"
    for finding in findings:
        yield from lines_of(finding)


def _outbox(overview: Overview) -> Iterator[str]:
    backlog = overview.outbox
    if backlog is not None:
        yield f"outbox     {_backlog(backlog)}"
        for name, groups in (
            ("priority", backlog.priorities),
            ("topic", backlog.topics),
            ("tenant", backlog.tenants),
        ):
            if backlog.messages:
                yield from _groups(name, groups)
    if overview.rate is not None:
        yield f"published  {_rate(overview.rate)} in the last {_window(overview.rate)}"


def _backlog(backlog: Backlog) -> str:
    if not backlog.messages:
        return "nothing waits"
    counts = ", ".join(
        f"{count:,} {name}"
        for count, name in (
            (backlog.ready, "ready"),
            (backlog.scheduled, "scheduled"),
            (backlog.refused, "refused"),
            (backlog.blocked, "blocked"),
        )
        if count
    )
    return f"{backlog.size} wait: {counts}{_oldest(backlog.waited)}"


def _oldest(waited: timedelta | None) -> str:
    return "" if waited is None else f"; the oldest for {write_duration(waited)}"


def _groups(name: str, groups: Sequence[BacklogGroup]) -> Iterator[str]:
    if groups:
        text = ", ".join(
            f"{'(none)' if it.name is None else it.name} {it.messages:,}"
            + ("" if it.waited is None else f" ({write_duration(it.waited)})")
            for it in groups
        )
        yield f"  by {name:<8}{text}"


def _rate(rate: Rate) -> str:
    text = f"{_number(rate.per_second)}/s"
    if rate.median is not None and rate.slow is not None:
        half, most = brief_duration(rate.median), brief_duration(rate.slow)
        text += f", half within {half}, 95 % within {most}"
    if rate.dead_lettered:
        text += f", dead letters {_number(rate.dead_lettered)}/s"
    return text


def _window(rate: Rate) -> str:
    return exact_duration(rate.window)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _processes(overview: Overview) -> Iterator[str]:
    processes = overview.processes
    if processes is None:
        return
    if processes.broker is not None:
        yield f"broker     {processes.broker}"
    for kind, running in (
        ("relays", processes.relays),
        ("consumers", processes.consumers),
    ):
        where = f" whose database is {overview.database}" if kind == "consumers" else ""
        yield f"{kind:<11}{len(running) or 'none'} running{where}"
        for it in running:
            yield f"  {_process(it, overview.at)}"


def _process(it: Process, now: datetime) -> str:
    text = f"{it.name} on {it.host}, running for {write_duration(now - it.since)}"
    if it.kind != "relay":
        text += f", from {it.broker}"
    if it.blocked_keys:
        text += f", {count(it.blocked_keys, 'blocked key')}"
    if it.failing_since is not None:
        text += f", failing for {write_duration(now - it.failing_since)}: {it.reason}"
    return text


def _consumers(overview: Overview) -> Iterator[_Table]:
    if not overview.consumers:
        return
    jobs = {it.consumer: it for it in overview.jobs}
    rows = []
    for it in overview.consumers:
        running = jobs.get(it.name)
        rows.append(
            (
                it.name,
                it.replicas,
                None if it.rate is None else f"{_number(it.rate.per_second)}/s",
                None
                if it.rate is None or it.rate.slow is None
                else brief_duration(it.rate.slow),
                None if it.lag is None else it.lag.size,
                None
                if it.lag is None or it.lag.waited is None
                else write_duration(it.lag.waited),
                None if running is None else running.queued,
                None if running is None else running.running + running.cancelling,
            )
        )
    yield _Table(
        (
            "consumer",
            "replicas",
            "handles",
            "95 % within",
            "waiting",
            "oldest",
            "jobs queued",
            "running",
        ),
        rows,
    )


def _blocked(overview: Overview) -> Iterator[str]:
    for it in overview.blocked:
        if it.oldest:
            keys = count(it.keys, "blocked key")
            alone = count(it.without_key, "refused message")
            yield f"{it.side:<11}{keys}, {alone} without a key: pillarbox blocked"


def _letters(overview: Overview) -> Iterator[_Table]:
    letters = [
        (
            reason.pending,
            reason.new,
            write_duration(reason.age),
            side.side,
            reason.origin,
            reason.topic
            if reason.topics == 1
            else f"{reason.topic} and {reason.topics - 1} more",
            reason.reason,
        )
        for side in overview.dead_letters
        for reason in side.reasons
    ]
    if letters:
        window = exact_duration(overview.dead_letters[0].window)
        names = (
            "dead letters",
            f"new in {window}",
            "oldest",
            "side",
            "origin",
            "topic",
            "reason",
        )
        yield _Table(names, letters)


def _tables(overview: Overview) -> Iterator[_Table]:
    rows = [
        (
            it.table,
            it.partitions,
            None if it.oldest is None else f"{it.oldest:%F}",
            f"{it.days_ahead:.3g} days",
            it.gaps,
            it.expired,
            len(it.held),
        )
        for it in overview.tables
        if it.follows is None
    ]
    if rows:
        columns = ("table", "partitions", "since", "ahead", "gaps", "expired", "held")
        yield _Table(columns, rows)


def _upkeep(overview: Overview) -> Iterator[str]:
    upkeep = overview.upkeep
    if upkeep is None:
        return
    if upkeep.succeeded_at is None or upkeep.age is None:
        text = "has not succeeded yet"
    else:
        text = f"succeeded {write_duration(upkeep.age)} ago"
    if upkeep.next_at is not None:
        text += f"; next at {upkeep.next_at:%R} UTC, by pg_cron"
    elif upkeep.late_at is not None:
        text += f"; late if not again by {upkeep.late_at:%R} UTC"
    yield f"upkeep     {text}"
