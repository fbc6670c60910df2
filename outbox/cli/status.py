"""`pillarbox status`: whether all is well, and what waits, fails and runs."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import datetime

from pillarbox.outbox.administration.check import Finding, Severity, status_of, unknown
from pillarbox.outbox.administration.checks.upkeep import Upkeep
from pillarbox.outbox.administration.doctor import examine_quickly, run_checks
from pillarbox.outbox.cli.command import (
    Databases,
    Json,
    command,
    new_app,
    opened_all,
)
from pillarbox.outbox.cli.output import lines_of, write_json, write_line, write_table
from pillarbox.outbox.duration import (
    brief_duration,
    exact_duration,
    write_duration,
    write_rate,
)
from pillarbox.outbox.errors import DatabaseUnavailableError
from pillarbox.outbox.logs.printable import count
from pillarbox.outbox.observability.measures.backlog import Backlog, BacklogGroup, Rate
from pillarbox.outbox.observability.measures.processes import Process
from pillarbox.outbox.observability.measures.reading import NEW
from pillarbox.outbox.observability.overview import Overview
from pillarbox.outbox.postgres.remedy import remedy_of

app = new_app()


@command(
    app,
    epilog="Exit status: 0 all well, 1 warnings, 3 errors, 4 no error, but a part "
    "couldn't be measured, 2 nothing could be measured. Lag is shown for consumers "
    "that read the outbox; for others, see their broker. A consumer is shown in the "
    "database of its handlers.",
)
def status(*, database: Databases = None, json: Json = False) -> int:
    """Show whether all is well: lag, failures and processes of each database."""
    read: list[tuple[Overview, tuple[Finding, ...]]] = []
    away: list[DatabaseUnavailableError] = []
    with opened_all(database, "status", away=away) as databases:
        for name, connection in databases.items():
            overview, findings = examine_quickly(connection)
            findings += (*run_checks(connection, ["superuser"]),)
            read.append((replace(overview, database=name), findings))
    missing = [unknown(str(it), remedy_of(it), "database") for it in away]
    code = status_of([*missing, *(it for _, findings in read for it in findings)])
    if json:
        shown = [{**asdict(it), "findings": findings} for it, findings in read]
        write_json({"status": code, "databases": shown, "missing": missing})
        return code
    for finding in missing:
        write_line(*lines_of(finding), "")
    for number, (overview, findings) in enumerate(read):
        if number:
            write_line("", "")
        _write_overview(overview, findings)
    return code


def _write_overview(overview: Overview, findings: Sequence[Finding]) -> None:
    _write_answer(overview, findings)
    write_line("")
    for part in (_outbox, _blocked, _processes):
        write_line(*part(overview))
    _write_consumers(overview)
    _write_letters(overview)
    _write_tables(overview)
    write_line("")
    _write_upkeep(overview.upkeep)


def _write_answer(overview: Overview, findings: Sequence[Finding]) -> None:
    counts = Counter(it.severity for it in findings)
    bad = [
        count(counts[severity], name)
        for severity, name in (
            (Severity.ERROR, "error"),
            (Severity.WARNING, "warning"),
            (Severity.UNKNOWN, "unknown part"),
        )
        if counts[severity]
    ]
    answer = ", ".join(bad) or "all well"
    write_line(f"{answer}: {overview.database} at {overview.at:%F %T} UTC")
    for finding in findings:
        write_line(*lines_of(finding))


def _write_part(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    if rows:
        write_line("")
        write_table(columns, rows)


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
        window = exact_duration(overview.rate.window)
        yield f"published  {_rate(overview.rate)} in the last {window}"


def _backlog(backlog: Backlog) -> str:
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
    text = f"{backlog.summary}: {counts}" if counts else backlog.summary
    if backlog.waited is not None:
        text += f"; the oldest for {write_duration(backlog.waited)}"
    return text


def _groups(name: str, groups: Sequence[BacklogGroup]) -> Iterator[str]:
    if groups:
        text = ", ".join(
            f"{'(none)' if it.name is None else it.name} {it.messages:,}"
            + ("" if it.waited is None else f" ({write_duration(it.waited)})")
            for it in groups
        )
        yield f"  by {name:<9}{text}"


def _rate(rate: Rate) -> str:
    text = write_rate(rate.per_second)
    if rate.median is not None and rate.slow is not None:
        half, most = brief_duration(rate.median), brief_duration(rate.slow)
        text += f", p50 {half}, p95 {most}"
    if rate.dead_lettered:
        text += f", dead letters {write_rate(rate.dead_lettered)}"
    return text


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
    if it.standing_by is not None:
        text += f", stands by for {it.standing_by}"
    if it.blocked_keys:
        text += f", {count(it.blocked_keys, 'blocked key')}"
    if running := it.running(now):
        text += f"; {running}"
    if it.failing_since is not None:
        text += f", failing for {write_duration(now - it.failing_since)}: {it.reason}"
    return text


def _write_consumers(overview: Overview) -> None:
    jobs = {it.consumer: it for it in overview.jobs}
    rows = []
    for it in overview.consumers:
        rate, lag, running = it.rate, it.lag, jobs.get(it.name)
        rows.append(
            (
                it.name,
                it.replicas,
                rate and write_rate(rate.per_second),
                rate and rate.slow and brief_duration(rate.slow),
                lag and lag.size,
                lag and lag.waited,
                running and running.queued,
                running and running.running + running.cancelling,
                ", ".join(pause.topic or "all" for pause in overview.pauses_of(it.name))
                or None,
            )
        )
    _write_part(
        (
            "consumer",
            "replicas",
            "handled",
            "p95",
            "lag",
            "oldest",
            "jobs queued",
            "running",
            "paused",
        ),
        rows,
    )


def _blocked(overview: Overview) -> Iterator[str]:
    if overview.blocked is not None and overview.blocked.oldest:
        yield f"refused    {overview.blocked.summary}: pillarbox blocked"


def _write_letters(overview: Overview) -> None:
    letters = [
        (
            reason.pending,
            reason.new,
            reason.age,
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
    window = exact_duration(NEW)
    _write_part(
        (
            "dead letters",
            f"new in {window}",
            "oldest",
            "side",
            "origin",
            "topic",
            "reason",
        ),
        letters,
    )


def _write_tables(overview: Overview) -> None:
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
    columns = ("table", "partitions", "since", "ahead", "gaps", "expired", "held")
    _write_part(columns, rows)


def _write_upkeep(upkeep: Upkeep | None) -> None:
    if upkeep is None:
        return
    if upkeep.succeeded_at is None or upkeep.age is None:
        text = "has never succeeded"
    else:
        text = f"succeeded {write_duration(upkeep.age)} ago"
    if upkeep.next_at is not None:
        text += f"; next at {upkeep.next_at:%R} UTC, by pg_cron"
    elif upkeep.late_at is not None:
        text += f"; next run due by {upkeep.late_at:%R} UTC"
    write_line(f"upkeep     {text}")
