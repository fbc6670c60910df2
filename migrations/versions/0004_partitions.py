"""Partitions, retention and the upkeep."""

from outbox.migrations.script import run

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None
grants = "versions/0004_partitions.grants.sql"


def upgrade() -> None:
    """Run the SQL files."""
    run("grants_on_partman.sql")
    run("versions/0004_partitions.up.sql")
    run("versions/0004_intervals.up.sql")
    run("versions/0004_days.up.sql")
    run("versions/0004_retention.up.sql")
    run("versions/0004_upkeep.up.sql")
