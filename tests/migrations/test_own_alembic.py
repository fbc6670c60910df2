"""An application with its own Alembic: neither history sees the other."""

import io
import re
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox.outbox.administration.migrate import migrate, unmigrate
from pillarbox.outbox.errors import MigrationError
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from tests.fixtures.sessions import execute
from tests.migrations.catalog import is_empty, snapshot

pytestmark = pytest.mark.timeout(300)

MODELS = """
from sqlalchemy import BigInteger, Column, DateTime, Integer, MetaData, Table, Text

import pillarbox.outbox.schema

metadata = MetaData()
Table("shop_order", metadata, Column("id", Integer, primary_key=True),
      Column("note", Text))
Table("customer", metadata, Column("id", Integer, primary_key=True))
Table("metric", metadata, Column("id", BigInteger, nullable=False),
      Column("at", DateTime(timezone=True), nullable=False),
      postgresql_partition_by="RANGE (at)")
target_metadata = [metadata, pillarbox.outbox.schema.metadata]
"""
RUN = """
def run(connection):
    leave_out = LeaveOut(connection)
    context.configure(connection=connection, target_metadata=target_metadata,
                      include_schemas=SCHEMAS, include_name=leave_out.include_name,
                      include_object=leave_out.include_object)
    with context.begin_transaction():
        context.run_migrations()

url = context.config.get_main_option("sqlalchemy.url")
"""
SYNC = """
with create_engine(url, poolclass=NullPool).connect() as connection:
    run(connection)
"""
ASYNC = """
async def run_async():
    async with create_async_engine(url, poolclass=NullPool).connect() as connection:
        await connection.run_sync(run)

asyncio.run(run_async())
"""
TEMPLATE = '''
"""${message}"""
from alembic import op
import sqlalchemy as sa

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}

def upgrade():
    ${upgrades if upgrades else "pass"}

def downgrade():
    ${downgrades if downgrades else "pass"}
'''
THEIRS = [
    "CREATE TABLE shop_order (id integer PRIMARY KEY)",
    "CREATE TABLE metric (id bigint NOT NULL, at timestamptz NOT NULL)"
    " PARTITION BY RANGE (at)",
    """
    DO $$ BEGIN
        IF (SELECT extversion FROM pg_extension WHERE extname = 'pg_partman') LIKE '4%'
        THEN PERFORM partman.create_parent('public.metric', 'at', 'native', '1 day');
        ELSE PERFORM partman.create_parent('public.metric', 'at', '1 day');
        END IF;
    END $$
    """,
]


@pytest.fixture
def application_database(database_url: str) -> str:
    """All of pillarbox's partitions, and a partitioned table of the application."""
    for statement in THEIRS:
        execute(database_url, statement)
    ours = "SELECT count(*) > 50 FROM pg_class WHERE relispartition AND relkind = 'r'"
    assert execute(database_url, ours) == [(True,)]
    return database_url


def project(folder: Path, url: str, *, mode: str, schemas: bool) -> Config:
    """Write an application's Alembic project."""
    (folder / "versions").mkdir()
    (folder / "script.py.mako").write_text(TEMPLATE.lstrip())
    (folder / "env.py").write_text(
        "import asyncio\nfrom alembic import context\n"
        "from sqlalchemy import create_engine\nfrom sqlalchemy.pool import NullPool\n"
        "from sqlalchemy.ext.asyncio import create_async_engine\n"
        "from pillarbox.outbox.administration.autogenerate import LeaveOut\n"
        f"SCHEMAS = {schemas}\n{MODELS}{RUN}{ASYNC if mode == 'async' else SYNC}"
    )
    driver = "asyncpg" if mode == "async" else "psycopg"
    config = Config(stdout=io.StringIO())
    config.set_main_option("script_location", str(folder))
    config.set_main_option("path_separator", "os")
    config.set_main_option("sqlalchemy.url", with_driver(url, driver))
    return config


def with_driver(url: str, driver: str) -> str:
    return f"postgresql+{driver}://{url.partition('://')[2]}"


def operations(folder: Path) -> set[str]:
    """Return the operations in the upgrade of the one generated migration."""
    (file,) = (folder / "versions").glob("*.py")
    upgrade = file.read_text().partition("def upgrade")[2].partition("def downgrade")[0]
    return set(re.findall(r"op\.(\w+\('\w+')", upgrade))


@pytest.mark.parametrize(("mode", "schemas"), [("sync", False), ("async", True)])
def test_autogenerate_finds_the_applications_changes_and_no_others(
    mode: str, schemas: bool, application_database: str, tmp_path: Path
) -> None:
    theirs = project(tmp_path, application_database, mode=mode, schemas=schemas)
    before = snapshot(application_database)

    command.revision(theirs, "first", autogenerate=True)

    assert operations(tmp_path) == {
        "create_table('customer'",
        "add_column('shop_order'",
    }
    command.upgrade(theirs, "head")
    command.check(theirs)
    assert snapshot(application_database) == before
    versions = "SELECT count(*) FROM alembic_version, outbox.alembic_version"
    assert execute(application_database, versions) == [(1,)]


@pytest.mark.week
@pytest.mark.usefixtures("alone")
async def test_migrations_run_on_the_applications_async_connection(
    database_url: str, empty_database_url: str
) -> None:
    engine = create_async_engine(with_driver(empty_database_url, "asyncpg"))

    async with engine.connect() as connection:
        await connection.run_sync(migrate, with_cron=False)
        assert not connection.in_transaction()
        await connection.run_sync(migrate, with_cron=False)
    await engine.dispose()

    assert snapshot(empty_database_url) == snapshot(database_url)
    unmigrate(empty_database_url)


@pytest.mark.usefixtures("alone")
def test_a_migration_stays_in_the_users_transaction_and_keeps_its_search_path(
    empty_database_url: str,
) -> None:
    own, usual = "public, inbox", '"$user", public'
    path, pin = text("SHOW search_path"), text(f"SET LOCAL search_path = {own}")
    engine = create_engine(sqlalchemy_url(empty_database_url))
    with engine.connect() as connection:
        connection.execute(pin)
        migrate(connection, with_cron=False)
        assert connection.scalar(path) == own
        connection.rollback()
        assert is_empty(snapshot(empty_database_url))
        assert connection.scalar(path) == usual
        connection.rollback()

        migrate(connection, with_cron=False)
        assert connection.scalar(path) == usual
        connection.rollback()

        unknown = "UPDATE outbox.alembic_version SET version_num = '9999'"
        execute(empty_database_url, unknown)
        connection.execute(pin)
        with pytest.raises(MigrationError):
            migrate(connection, with_cron=False)
        assert connection.scalar(path) == own
        connection.rollback()
    engine.dispose()
