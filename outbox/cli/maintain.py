"""`pillarbox maintain`: the upkeep, started by any scheduler."""

import sys
from typing import Annotated

import typer
from psycopg.errors import Diagnostic

from pillarbox.outbox.administration.upkeep import (
    UpkeepStep,
    accept_clock,
    maintain,
    plan_upkeep,
)
from pillarbox.outbox.cli.command import (
    Database,
    DryRun,
    Json,
    command,
    new_app,
    opened,
)
from pillarbox.outbox.cli.output import warn, write_json, write_line
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.logs.printable import count, printable

app = new_app()


@command(app, "maintain")
def _maintain(
    *,
    database: Database = None,
    dry_run: DryRun = False,
    accept_the_clock: Annotated[
        bool,
        typer.Option(
            "--accept-clock",
            envvar="PILLARBOX_MAINTAIN_ACCEPT_CLOCK",
            help="Drop expired partitions even if the last upkeep was long ago or is"
            " in the future. Use this once the server's clock is right.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Create future partitions and drop expired ones, where pg_cron doesn't."""
    if json and not dry_run:
        raise ConfigError("--json: only --dry-run has a list to print; add it")
    with opened(database, "maintain") as connection:
        if dry_run:
            steps = plan_upkeep(connection)
            if json:
                write_json(steps)
            else:
                sys.stdout.write("".join(map(_line, steps)) or "nothing to do\n")
        else:
            connection.add_notice_handler(_warn)
            if accept_the_clock:
                accept_clock(connection)
            maintain(connection, report=write_line)


def _line(step: UpkeepStep) -> str:
    subject = step.partition or step.parent_table
    if step.step == "make" and step.starts_at:
        subject += f" from {step.starts_at:%Y-%m-%d %H:%M}"
    rows = f" ({count(step.unsettled, 'row')})" if step.unsettled else ""
    return (
        f"{step.step:<8}  {printable(subject)}: {printable(step.reason)}{rows}\n"
        f"          {printable(step.statement)}\n"
    )


def _warn(notice: Diagnostic) -> None:
    if notice.severity_nonlocalized != "NOTICE" or notice.message_hint is not None:
        warn(f"{notice.message_primary}; {notice.message_hint or ''}")
