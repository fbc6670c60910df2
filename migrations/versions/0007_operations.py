"""Operations that people started on the page, and the page's role."""

from outbox.migrations.script import run

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None
grants = "versions/0007_operations.grants.sql"


def upgrade() -> None:
    """Run the SQL file."""
    run("versions/0007_operations.up.sql")
