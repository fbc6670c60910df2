"""No routine is affected by its caller's search_path."""

from tests.fixtures.sessions import execute

# PostgreSQL resolves the names in the body of the others when it creates them. Only a
# procedure without a path of its own can commit: this one sets it for each transaction.
_BY_NAME = """
SELECT p.oid::regprocedure::text, p.prosecdef, p.proconfig[1] FROM pg_proc p
 WHERE p.pronamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace)
   AND (p.prosecdef OR p.prosqlbody IS NULL)
   AND p.oid <> 'outbox.maintain(timestamptz)'::regprocedure
"""


def test_every_routine_that_looks_names_up_has_a_pinned_path(database_url: str) -> None:
    found = execute(database_url, _BY_NAME)

    assert {path for *_, path in found} == {"search_path=pg_catalog, pg_temp"}
    assert sum(is_definer for _, is_definer, _ in found) > 10
