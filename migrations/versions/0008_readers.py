"""No copy of the messages for consumers: they read the outbox."""

from pillarbox.outbox.migrations.script import run

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Run the SQL files."""
    for file in (
        "versions/0008_copy.up.sql",
        "versions/0008_subscribe.up.sql",
        "versions/0008_life.up.sql",
        "versions/0008_differences.up.sql",
        "versions/0008_comments.up.sql",
    ):
        run(file)
