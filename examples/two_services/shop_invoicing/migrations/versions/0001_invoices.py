"""Invoices."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "invoices",
        sa.Column("order_id", sa.Uuid, primary_key=True),
        sa.Column("number", sa.String, nullable=False),
        sa.Column("amount", sa.Numeric, nullable=False),
    )
