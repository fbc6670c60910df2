"""`pillarbox partitions`: the partitions, drawn as a timeline."""

from dataclasses import asdict

from pillarbox.outbox.administration.partitions import (
    draw_timeline,
    legend,
    read_partitions,
)
from pillarbox.outbox.cli.command import Database, Json, command, new_app, opened
from pillarbox.outbox.cli.output import write_json, write_line

app = new_app()


@command(app)
def partitions(*, database: Database = None, json: Json = False) -> None:
    """Show partitions: past, today, premade, and any that retention is holding."""
    with opened(database, "partitions") as connection:
        found = read_partitions(connection)
    if json:
        write_json(
            [
                {**asdict(policy), "partitions": partitions}
                for policy, partitions in found.items()
            ]
        )
        return
    write_line(legend())
    for policy, partitions in found.items():
        write_line("", *draw_timeline(policy, partitions))
