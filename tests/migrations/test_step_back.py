"""One version back and forward again, with rows in the tables."""

import pytest
from alembic import command

from outbox import migrate as migrations
from tests.fixtures.relay import execute
from tests.migrations.catalog import snapshot
from tests.migrations.retiring import EXPIRED
from tests.migrations.test_upkeep import add_old, old_partition

pytestmark = pytest.mark.usefixtures("alone")


def test_the_version_before_works_on_the_same_rows(empty_database_url: str) -> None:
    url = empty_database_url
    migrations.migrate(url, with_cron=False)
    old_partition(url)
    add_old(url)
    before = snapshot(url)
    config = migrations._config("pillarbox", "partman", url=url, with_cron=False)

    command.downgrade(config, "0004")
    execute(url, "CALL outbox.maintain(3)")
    assert len(execute(url, EXPIRED)) == 1
    command.upgrade(config, "head")

    assert snapshot(url) == before
    execute(url, "UPDATE outbox.message SET published_at = now()")
    execute(url, "CALL outbox.maintain()")
    assert execute(url, EXPIRED) == []
