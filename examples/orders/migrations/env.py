"""Runs the application's own migrations; pillarbox has its own command for its."""

from alembic import context
from sqlalchemy import NullPool, create_engine

from orders.database import DATABASE, Base

url = context.config.attributes.get("url", DATABASE)
engine = create_engine(url, poolclass=NullPool)

with engine.connect() as connection:
    context.configure(connection=connection, target_metadata=Base.metadata)
    with context.begin_transaction():
        context.run_migrations()
