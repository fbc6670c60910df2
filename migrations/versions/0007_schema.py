"""The schema of the first release."""

from pillarbox.outbox.migrations.script import run

revision = "0007"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Run the SQL files."""
    run("versions/0001_shared.up.sql")
    for schema in ("outbox", "inbox"):
        run("versions/0001_side.up.sql", schema=schema)
    for file in (
        "versions/0002_outbox.up.sql",
        "versions/0003_inbox.up.sql",
        "versions/0005_jobs.up.sql",
        "versions/0004_partitions.up.sql",
        "versions/0004_intervals.up.sql",
        "versions/0004_days.up.sql",
        "versions/0004_retention.up.sql",
        "versions/0004_upkeep.up.sql",
        "versions/0007_operations.up.sql",
        "versions/0006_promises.up.sql",
    ):
        run(file)
