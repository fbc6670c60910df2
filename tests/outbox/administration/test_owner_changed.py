"""The doctor says which role the tables were given to, and how to get them back."""

from collections.abc import Iterator
from uuid import uuid4

import pytest

from outbox.testing.postgres import PostgresServer
from tests.fixtures.doctor import Doctor
from tests.fixtures.pasting import paste
from tests.fixtures.sessions import execute


@pytest.fixture
def dba(server: PostgresServer, database_url: str) -> Iterator[str]:
    role = f"dba_{uuid4().hex}"
    execute(server.url, f"CREATE ROLE {role}")
    yield role
    execute(database_url, f"DROP OWNED BY {role}")
    execute(server.url, f"DROP ROLE {role}")


def test_reassigned_tables_are_reported_with_a_remedy_that_returns_ours_alone(
    database_url: str, dba: str, doctor: Doctor
) -> None:
    url = database_url
    execute(url, "CALL outbox.maintain()")
    execute(url, f"CREATE TABLE public.theirs (); ALTER TABLE theirs OWNER TO {dba}")
    execute(url, f"REASSIGN OWNED BY pillarbox_owner TO {dba}")

    _, findings = doctor(url)

    (found,) = (f for f in findings if f["check"] == "roles")
    assert found["severity"] == "error"
    assert f"the tables belong to {dba}, not to pillarbox_owner" in found["finding"]
    assert "doesn't exist" not in "".join(f["finding"] for f in findings)

    paste(url, found["remedy"])

    assert doctor(url) == (0, [])
    owner = (
        "SELECT relowner::regrole::text FROM pg_class WHERE oid = 'theirs'::regclass"
    )
    assert execute(url, owner) == [(dba,)]
