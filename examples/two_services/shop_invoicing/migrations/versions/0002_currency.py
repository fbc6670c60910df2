"""The currency of an invoice; the release before writes rows without it."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the column with a default."""
    op.add_column(
        "invoices",
        sa.Column("currency", sa.String, nullable=False, server_default="EUR"),
    )
