"""Roles and schemas."""

from outbox.migrations.script import run

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None
grants = "versions/0001_roles.grants.sql"


def upgrade() -> None:
    """Run the SQL file."""
    run("versions/0001_roles.up.sql")
