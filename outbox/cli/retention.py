"""`pillarbox retention`: how long rows are kept, what is held longer, how to set it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Annotated, Final, Literal

import typer

from outbox.administration.connection import (
    AdministrationConnection,
    administration,
)
from outbox.administration.retention import (
    INTERVALS,
    Policy,
    change_policy,
    read_policies,
)
from outbox.cli.command import (
    Database,
    Json,
    command,
    database_url,
    duration_option,
    new_app,
)
from outbox.cli.output import warn, write_json, write_line
from outbox.duration import exact_duration, read_duration, write_duration
from outbox.errors import ConfigError
from outbox.observability.overview import HeldPartition, Scope, read_overview
from outbox.postgres.late_messages import KEPT_FOR_LATE_MESSAGES, minimum_retention

_HELD: Final = Scope(parts=["tables"], patience=timedelta(minutes=1))

app = new_app()


@command(
    app,
    epilog="keep-table: keep the table of an expired partition after it is detached; "
    "drop-table: drop it, which is the default.",
)
def retention(
    action: Annotated[
        Literal["show", "set", "keep-table", "drop-table"],
        typer.Argument(help="What to do."),
    ] = "show",
    table: Annotated[
        str | None,
        typer.Argument(help="The table: outbox.message, or message.", metavar="TABLE"),
    ] = None,
    kept: Annotated[
        str | None,
        typer.Argument(
            help="set: how long rows stay, such as 7d, 36h or 2w.", metavar="RETENTION"
        ),
    ] = None,
    *,
    premake: Annotated[
        int | None,
        typer.Option("--premake", metavar="N", help="How many partitions to premake."),
    ] = None,
    interval: Annotated[
        str | None,
        typer.Option(
            "--interval",
            metavar="|".join(INTERVALS),
            help="The width of a partition.",
        ),
    ] = None,
    minimum: Annotated[
        timedelta | None,
        duration_option(
            "--minimum",
            help="How late a message can still reach its consumer, given your delays "
            "and retries; a shorter retention is refused.",
        ),
    ] = None,
    database: Database = None,
    json: Json = False,
) -> None:
    """Show how long each table keeps its rows and what is held longer, or set it."""
    asked = {kept, premake, interval, minimum} != {None}
    if action == "set" and (not table or not asked):
        raise ConfigError(
            "nothing to set: write pillarbox retention set TABLE 7d, or give --premake"
        )
    keeps = {"keep-table": True, "drop-table": False}.get(action)
    if keeps is not None and (not table or asked):
        raise ConfigError(
            f"{action} takes only a table: write"
            f" pillarbox retention {action} outbox.message"
        )
    if action == "show" and table:
        raise ConfigError("show takes no table: write pillarbox retention show")
    with administration(
        database_url(database), application_name="pillarbox retention"
    ) as connection:
        held: Mapping[str, Sequence[HeldPartition]] | None = None
        if action == "show" or table is None:
            policies = read_policies(connection)
            held = _read_held(connection)
        else:
            policies = [
                change_policy(
                    connection,
                    table,
                    retention=None
                    if kept is None
                    else read_duration("retention", kept),
                    premake=premake,
                    interval=interval,
                    minimum=minimum,
                    keep_table=keeps,
                )
            ]
    if json:
        write_json(
            [
                policy_fields(policy)
                if held is None
                else policy_fields(policy)
                | {"held": [asdict(it) for it in held.get(policy.parent_table, ())]}
                for policy in policies
            ]
        )
    else:
        for policy in policies:
            write_line(_line(policy))
            for it in (held or {}).get(policy.parent_table, ()):
                write_line(
                    f"  {it.partition} is held, past its retention for"
                    f" {write_duration(it.overdue)}: {it.reason}"
                )
    if action == "set":
        _warn_of(policies)


def policy_fields(policy: Policy) -> dict[str, object]:
    """Return a policy for JSON, with durations in seconds."""
    return {
        "table": policy.parent_table,
        "interval_seconds": int(policy.span.total_seconds()),
        "retention_seconds": int(policy.retention.total_seconds()),
        "premake": policy.premake,
        "minimum_seconds": None
        if policy.minimum is None
        else int(policy.minimum.total_seconds()),
        "keep_table": policy.keep_table,
        "follows": policy.follows,
    }


def _read_held(
    connection: AdministrationConnection,
) -> Mapping[str, Sequence[HeldPartition]] | None:
    connection.execute("SET timezone = 'UTC'")
    overview = read_overview(connection, _HELD)
    for missing in overview.missing:
        warn(
            f"what holds partitions is unknown: {missing.reason};"
            f" remedy: {missing.remedy}"
        )
    return None if overview.missing else {it.table: it.held for it in overview.tables}


def _warn_of(policies: Sequence[Policy]) -> None:
    needed = minimum_retention()
    for policy in policies:
        if policy.parent_table in KEPT_FOR_LATE_MESSAGES and policy.retention < needed:
            warn(
                f"{policy.parent_table} is kept {exact_duration(policy.retention)}: "
                "choose Limits(max_delay=…) and the retries of relay and consumer so "
                "that no message comes later; with their defaults one can come after "
                f"{exact_duration(needed)}"
            )


def _line(policy: Policy) -> str:
    names = {span: name for name, span in INTERVALS.items()}
    interval = names.get(policy.span, exact_duration(policy.span))
    said = (
        f"{policy.parent_table:<20} {interval:<8}"
        f" kept {exact_duration(policy.retention):<6} {policy.premake:>3} ahead"
    )
    if policy.follows is not None:
        return f"{said}  follows {policy.follows}"
    if policy.minimum is not None:
        said += f"  at least {exact_duration(policy.minimum)}"
    return said + ("  then kept as a table" if policy.keep_table else "")
