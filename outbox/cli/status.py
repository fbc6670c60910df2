"""`pillarbox status`: whether all is well, and what waits, fails and runs."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Annotated, Any, Final, NamedTuple

import typer

from outbox.administration.check import Severity
from outbox.administration.connection import administration
from outbox.administration.size import write_size
from outbox.cli.command import (
    Database,
    Duration,
    Json,
    command,
    database_url,
    duration_option,
    new_app,
)
from outbox.cli.doctor import status_of
from outbox.cli.output import write_json, write_line, write_table
from outbox.duration import brief_duration, exact_duration, write_duration
from outbox.errors import ConfigError
from outbox.observability.overview import (
    Backlog,
    BacklogGroup,
    Overview,
    Rate,
    Scope,
    read_overview,
)

APPLICATION_NAME: Final = "pillarbox status"
"""The application_name of its session in `pg_stat_activity`."""
_MAX_REASON: Final = 80
_MOST_PINS: Final = 5
_MOST_BLOCKED: Final = 5
_MOST_HELD: Final = 3

app = new_app()


@command(
    app,
    epilog="Exit status: 0 all well, 1 warnings, 3 errors, 4 no error, but a part "
    "couldn't be measured, 2 nothing could be measured. Of the inbox's messages, those "
    "of the postgres broker are shown; other brokers know what waits there.",
)
def status(
    *,
    window: Annotated[
        timedelta,
        duration_option(
            "--window", help="Measure rates and latencies over the last minutes."
        ),
    ] = Duration(minutes=5),
    sizes: Annotated[
        bool,
        typer.Option("--sizes", help="Show bytes; reads the size of every file."),
    ] = False,
    database: Database = None,
    json: Json = False,
) -> int:
    """Show whether all is well, and what waits, fails and runs, on one screen."""
    if window <= timedelta(0):
        raise ConfigError(f"window={exact_duration(window)}: must be above 0s")
    url = database_url(database)
    with administration(url, application_name=APPLICATION_NAME) as connection:
        connection.execute("SET timezone = 'UTC'")
        overview = read_overview(connection, Scope(window=window, sizes=sizes))
    code = status_of(overview.findings)
    if json:
        write_json(_to_json(overview))
        return code
    for block in _blocks(overview):
        if isinstance(block, _Table):
            write_line("")
            write_table(block.columns, block.rows)
        else:
            write_line(block)
    return code


def _to_json(overview: Overview) -> dict[str, Any]:
    return {"status": status_of(overview.findings), **asdict(overview)}


class _Table(NamedTuple):
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


def _blocks(overview: Overview) -> Iterator[str | _Table]:
    yield from _answer(overview)
    yield ""
    yield from _outbox(overview)
    yield from _relays(overview)
    yield from _consumers(overview)
    yield from _failures(overview)
    yield from _tables(overview)
    yield ""
    yield from _upkeep(overview)
    yield from _pins(overview)


def _answer(overview: Overview) -> Iterator[str]:
    moment = f"{overview.database} at {overview.at:%F %T} UTC"
    counts = [
        (sum(it.severity is severity for it in overview.findings), one, many)
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
    for finding in overview.findings:
        yield f"{finding.severity:<8} {finding.finding}"
        yield f"         {finding.remedy}"


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
    many = f"{backlog.messages:,}"
    if not backlog.is_complete:
        many = f"more than {many}"
        if backlog.estimated is not None:
            many += f" (about {backlog.estimated:,})"
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
    return f"{many} wait: {counts}{_oldest(backlog.waited)}"


def _oldest(waited: timedelta | None) -> str:
    return "" if waited is None else f"; the oldest for {write_duration(waited)}"


def _groups(name: str, groups: Sequence[BacklogGroup]) -> Iterator[str]:
    if groups:
        said = ", ".join(
            f"{'(none)' if it.name is None else it.name} {it.messages:,}"
            + ("" if it.waited is None else f" ({write_duration(it.waited)})")
            for it in groups
        )
        yield f"  by {name:<8}{said}"


def _rate(rate: Rate) -> str:
    said = f"{_number(rate.per_second)}/s"
    if rate.median is not None and rate.slow is not None:
        half, most = brief_duration(rate.median), brief_duration(rate.slow)
        said += f", half within {half}, 95 % within {most}"
    if rate.dead_lettered:
        said += f", dead letters {_number(rate.dead_lettered)}/s"
    return said


def _window(rate: Rate) -> str:
    return exact_duration(rate.window)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _relays(overview: Overview) -> Iterator[str]:
    processes = overview.processes
    if processes is None:
        return
    if processes.broker is not None:
        yield f"broker     {processes.broker}"
    if not processes.relays:
        yield "relays     none connected"
        return
    free = f", {len(processes.free)} not held" if processes.free else ""
    yield f"relays     {processes.lanes} lanes{free}"
    for relay in processes.relays:
        since = ""
        if relay.since is not None:
            since = f", since {write_duration(overview.at - relay.since)}"
        yield f"  {relay.name}: {len(relay.lanes)} lanes{since}"


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
                None if it.lag is None else _count(it.lag),
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


def _count(backlog: Backlog) -> str:
    return f"{'' if backlog.is_complete else '> '}{backlog.messages:,}"


def _failures(overview: Overview) -> Iterator[_Table]:
    refused = [
        (
            it.key,
            blocked.side,
            it.topic,
            it.consumer,
            it.attempts,
            write_duration(overview.at - it.created_at),
            write_duration(it.available_at - overview.at),
            None if it.last_error is None else it.last_error[:_MAX_REASON],
        )
        for blocked in overview.blocked
        for it in blocked.oldest[:_MOST_BLOCKED]
    ]
    if refused:
        columns = (
            "refused, its key",
            "side",
            "topic",
            "consumer",
            "attempts",
            "age",
            "due in",
            "reason",
        )
        yield _Table(columns, refused)
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
            *([] if it.bytes is None else [write_size(it.bytes)]),
            ", ".join(
                f"{held.starts_at:%F} by"
                f" {'?' if held.unsettled is None else held.unsettled} rows"
                for held in it.held[:_MOST_HELD]
            )
            or None,
        )
        for it in overview.tables
        if it.follows is None or it.bytes is not None
    ]
    if rows:
        size = () if overview.tables[0].bytes is None else ("size",)
        columns = ("table", "partitions", "since", "ahead", "gaps", "expired")
        yield _Table((*columns, *size, "held"), rows)


def _upkeep(overview: Overview) -> Iterator[str]:
    upkeep = overview.upkeep
    if upkeep is None:
        return
    if upkeep.succeeded_at is None or upkeep.age is None:
        said = "has not succeeded yet"
    else:
        said = f"succeeded {write_duration(upkeep.age)} ago"
    if upkeep.failure is not None:
        said += f", failed since: {upkeep.failure}"
    if upkeep.next_at is not None:
        said += f"; next at {upkeep.next_at:%R} UTC, by pg_cron"
    elif upkeep.late_at is not None:
        said += f"; late if not again by {upkeep.late_at:%R} UTC"
    yield f"upkeep     {said}"


def _pins(overview: Overview) -> Iterator[str]:
    if not overview.pins:
        return
    yield f"long transactions ({len(overview.pins)})"
    for pin in overview.pins[:_MOST_PINS]:
        open_for = "?" if pin.open_for is None else write_duration(pin.open_for)
        behind = "" if pin.xids is None else f", {pin.xids:,} transactions behind"
        writing = ", has written" if pin.is_writing else ""
        yield (
            f"  {pin.kind} {pin.name or '-'} of {pin.role or '-'},"
            f" pid {pin.pid or '-'}: {open_for}{writing}{behind}"
        )
