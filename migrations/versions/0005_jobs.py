"""Jobs, the leased receipts of long handlers; and suspects."""

from outbox.migrations.script import run

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None
grants = "versions/0005_jobs.grants.sql"


def upgrade() -> None:
    """Run the SQL file."""
    run("versions/0005_jobs.up.sql")
