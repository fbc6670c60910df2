"""Limits: how large the columns of a message may be."""

from outbox.migrations.script import run

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None
grants = "versions/0006_limits.grants.sql"


def upgrade() -> None:
    """Run the SQL file."""
    run("versions/0006_limits.up.sql")
    run("versions/0006_promises.up.sql")
