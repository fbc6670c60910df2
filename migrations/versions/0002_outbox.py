"""The outbox."""

from outbox.migrations.script import run

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None
grants = "versions/0002_outbox.grants.sql"


def upgrade() -> None:
    """Run the SQL file."""
    run("versions/0002_outbox.up.sql")
