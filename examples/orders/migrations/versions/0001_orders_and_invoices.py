"""Orders and invoices."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "orders",
        sa.Column("id", sa.Uuid, primary_key=True),
        sa.Column("customer", sa.String, nullable=False),
        sa.Column("amount", sa.Numeric, nullable=False),
    )
    op.create_table(
        "invoices",
        sa.Column("order_id", sa.Uuid, primary_key=True),
        sa.Column("surname", sa.String, nullable=False),
        sa.Column("amount", sa.Numeric, nullable=False),
    )
