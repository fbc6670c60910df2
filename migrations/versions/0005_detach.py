"""Retention that stalls nobody: detach concurrently, look again, drop."""

from outbox.migrations.script import run

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Run the SQL files."""
    run("versions/0005_detach.up.sql")
    run("versions/0005_upkeep.up.sql")


def downgrade() -> None:
    """Run the SQL files."""
    run("versions/0005_detach.down.sql")
