"""The inbox."""

from outbox.migrations.script import run

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None
grants = "versions/0003_inbox.grants.sql"


def upgrade() -> None:
    """Run the SQL file."""
    run("versions/0003_inbox.up.sql")
