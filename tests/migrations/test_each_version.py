"""A downgrade to each version and an upgrade back, with rows in every table."""

from typing import Final

import pytest
from alembic.script import ScriptDirectory

from outbox.administration import migrate as migrations
from tests.fixtures.sessions import execute
from tests.migrations.catalog import snapshot
from tests.migrations.filled import Contents, contents, empty_tables, fill
from tests.migrations.test_step_back import step
from tests.outbox.administration.retiring import EXPIRED
from tests.outbox.administration.test_upkeep import add_old, old_partition

pytestmark = pytest.mark.usefixtures("alone")

_SCRIPTS: Final = ScriptDirectory.from_config(
    migrations._config("pillarbox", "partman")
)
VERSIONS: Final = sorted(script.revision for script in _SCRIPTS.walk_revisions())[:-1]
# Rows that a migration itself writes are part of its schema.
WRITTEN_BY_MIGRATIONS: Final = {
    *("outbox.alembic_version", "outbox.partition_policy", "outbox.retiring_partition"),
    *("outbox.upkeep", "outbox.index_promise"),
}


def rows_of_users(url: str) -> Contents:
    return {
        table: rows
        for table, rows in contents(url).items()
        if table not in WRITTEN_BY_MIGRATIONS
    }


@pytest.mark.month
@pytest.mark.parametrize("version", VERSIONS)
def test_a_downgrade_keeps_rows_of_older_tables_and_loses_newer_ones(
    version: str, database_url: str
) -> None:
    url = database_url
    old_partition(url)
    add_old(url)
    fill(url)
    schema, rows = snapshot(url), rows_of_users(url)
    assert empty_tables(rows) == []

    step(url, version)
    there = rows_of_users(url)
    assert there == {table: rows[table] for table in there}
    step(url, "head")

    kept = rows_of_users(url)
    assert {table: kept[table] for table in there} == there
    later = kept.keys() - there.keys()
    assert [t for t in later if not t.endswith("_seq") and kept[t]] == []
    if "outbox.message" in there:
        assert snapshot(url) == schema
        execute(url, "CALL outbox.maintain()")
        assert len(execute(url, EXPIRED)) == 1
    fill(url)
    assert empty_tables(rows_of_users(url)) == []
