"""The comments in the database, from which `make reference` writes the page of SQL."""

from tests.fixtures.sessions import execute


def test_each_column_of_a_view_that_a_role_may_read_says_what_it_means(
    database_url: str,
) -> None:
    columns = execute(
        database_url,
        """
        SELECT p.relation, a.attname, col_description(a.attrelid, a.attnum)
          FROM (SELECT DISTINCT q.relation FROM outbox.promise AS q
                 WHERE q.fact LIKE 'right of % to SELECT%') AS p
          JOIN pg_class AS c ON c.oid = to_regclass(p.relation) AND c.relkind = 'v'
          JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0
        """,
    )
    assert ("outbox.message_status", "published_at") in {it[:2] for it in columns}
    assert [it for it in columns if not it[2]] == []
