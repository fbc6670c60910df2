"""`pillarbox partitions`: the partitions, and what holds those past their retention."""

from dataclasses import asdict

from outbox.administration.connection import administration
from outbox.administration.partitions import read_partitions
from outbox.administration.size import write_size
from outbox.cli.command import Database, Json, command, database_url, new_app
from outbox.cli.output import write_json, write_table

app = new_app()


@command(app)
def partitions(*, database: Database = None, json: Json = False) -> None:
    """Show partitions: past, today, and any that retention is holding."""
    with administration(
        database_url(database), application_name="pillarbox partitions"
    ) as connection:
        connection.execute("SET timezone = 'UTC'")
        found = read_partitions(connection)
    if json:
        write_json(
            [
                {**policy.as_json(), "partitions": [asdict(p) for p in partitions]}
                for policy, partitions in found.items()
            ]
        )
        return
    write_table(
        ("table", "begins", "place", "rows", "size", "why"),
        [
            (
                policy.parent_table,
                None if it.starts_at is None else f"{it.starts_at:%Y-%m-%d %H:%M}",
                it.place,
                it.rows,
                write_size(it.bytes),
                "" if it.reason is None else f"{it.reason}: {it.query}",
            )
            for policy, partitions in found.items()
            for it in partitions
            if it.place != "ahead"
        ],
    )
