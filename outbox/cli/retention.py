"""`pillarbox retention`: how long rows are kept, and how to set it."""

from datetime import timedelta
from typing import Annotated, Literal

import typer

from pillarbox.outbox.administration.retention import (
    INTERVALS,
    Policy,
    change_policy,
    read_policies,
)
from pillarbox.outbox.cli.command import (
    Database,
    Json,
    command,
    duration_option,
    new_app,
    opened,
)
from pillarbox.outbox.cli.output import write_json, write_line
from pillarbox.outbox.duration import exact_duration, read_duration
from pillarbox.outbox.errors import ConfigError

app = new_app()


@command(
    app,
    epilog="pillarbox partitions shows what is held longer. keep-table: keep the "
    "table of an expired partition after it is detached; drop-table: drop it, which is "
    "the default.",
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
    interval: Annotated[
        str | None,
        typer.Option(metavar="|".join(INTERVALS), help="The width of a partition."),
    ] = None,
    minimum: Annotated[
        timedelta | None,
        duration_option(
            help="Longest time after which a message can still reach its consumer, "
            "given your delays and retries; a shorter retention is refused."
        ),
    ] = None,
    database: Database = None,
    json: Json = False,
) -> None:
    """Show how long each table keeps its rows, or set it."""
    asked = {kept, interval, minimum} != {None}
    keeps = {"keep-table": True, "drop-table": False}.get(action)
    if (table is not None, asked) != (action != "show", action == "set"):
        raise ConfigError(
            f"{action}: write show, or set TABLE with what to change, such as set "
            "outbox.message 7d, or keep-table TABLE, or drop-table TABLE"
        )
    with opened(database, "retention") as connection:
        if table is None:
            policies = read_policies(connection)
        else:
            policies = [
                change_policy(
                    connection,
                    table,
                    retention=None
                    if kept is None
                    else read_duration("retention", kept),
                    interval=interval,
                    minimum=minimum,
                    keep_table=keeps,
                )
            ]
    if json:
        write_json(policies)
    else:
        write_line(*map(_line, policies))


def _line(policy: Policy) -> str:
    names = {span: name for name, span in INTERVALS.items()}
    interval = names.get(policy.span, exact_duration(policy.span))
    text = (
        f"{policy.parent_table:<20} {interval:<8}"
        f" kept {exact_duration(policy.retention):<6} {policy.premake:>3} ahead"
    )
    if policy.follows is not None:
        return f"{text}  follows {policy.follows}"
    if policy.minimum is not None:
        text += f"  at least {exact_duration(policy.minimum)}"
    return text + ("  then kept as a table" if policy.keep_table else "")
