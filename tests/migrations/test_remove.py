"""A removal drops everything of ours, and nothing of other people's."""

import re

import pytest

from outbox.administration.migrate import unmigrate
from outbox.errors import MigrationError
from tests.fixtures.sessions import execute
from tests.migrations.catalog import snapshot

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        ("VIEW public.mine AS SELECT id FROM outbox.message", "view public.mine"),
        ("TABLE outbox.mine (id int)", "table outbox.mine"),
        (
            "FUNCTION public.mine() RETURNS SETOF inbox.job_status"
            " LANGUAGE sql AS 'SELECT * FROM inbox.job_status'",
            "function public.mine()",
        ),
    ],
)
def test_an_object_of_others_in_the_way_is_kept_and_named(
    theirs: str, named: str, database_url: str
) -> None:
    execute(database_url, f"CREATE {theirs}")
    before = snapshot(database_url)

    with pytest.raises(MigrationError, match=rf"depend on ours: .*{re.escape(named)}"):
        unmigrate(database_url)

    assert snapshot(database_url) == before


def test_what_the_owner_owns_elsewhere_is_kept_and_named(database_url: str) -> None:
    url = database_url
    execute(
        url,
        "CREATE SCHEMA mine; GRANT CREATE ON SCHEMA mine TO pillarbox_owner;"
        " SET ROLE pillarbox_owner; CREATE TABLE mine.archive (id int)",
    )
    with pytest.raises(MigrationError, match=r"the table mine\.archive belongs to"):
        unmigrate(url)
    execute(url, "ALTER TABLE mine.archive OWNER TO CURRENT_USER")

    unmigrate(url)

    assert execute(url, "SELECT count(*) FROM mine.archive") == [(0,)]
