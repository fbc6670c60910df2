"""Run the migrations of this service; pillarbox has its own command for its."""

from alembic import context
from sqlalchemy import NullPool, create_engine

from pillarbox import LeaveOut, sqlalchemy_url
from shop_orders.service import DATABASE, Base

engine = create_engine(sqlalchemy_url(DATABASE), poolclass=NullPool)

with engine.connect() as connection:
    leave_out = LeaveOut(connection)
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        include_name=leave_out.include_name,
        include_object=leave_out.include_object,
    )
    with context.begin_transaction():
        context.run_migrations()
