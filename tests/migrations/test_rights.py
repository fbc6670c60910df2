"""Each role has the privileges that it needs and no others, as statements show."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.resources import files
from typing import Any, TypeAlias

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

import pillarbox
from pillarbox import Message
from pillarbox.outbox.administration.names import ROLES
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.postgres import Template, new_database
from tests.fixtures.sessions import execute
from tests.migrations.rights import ALLOWED, CHANGES, DETACH, FORBIDDEN, UPDATED

As: TypeAlias = Callable[[str], AbstractContextManager[psycopg.Connection[Any]]]
REFUSED = psycopg.errors.InsufficientPrivilege
FOLDER = files("pillarbox.outbox.migrations")
DECLARED = (
    "SELECT relation, substring(fact FROM '^right of pillarbox_(\\S+) to '),"
    " substring(fact FROM ' to (\\S+)') FROM outbox.rights()"
    " WHERE fact LIKE 'right of %'"
)


@pytest.fixture(scope="module")
def acting(server: PostgresServer, template: Template) -> Iterator[As]:
    """One database for all tests: the rows that a test leaves don't affect others."""
    with new_database(server, "pillarbox_rights", template) as name:

        @contextmanager
        def act(role: str) -> Iterator[psycopg.Connection[Any]]:
            url = server.database_url(name)
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute(f"SET SESSION AUTHORIZATION pillarbox_{role}")
                yield connection

        yield act


@pytest.mark.parametrize("role", ALLOWED)
def test_a_role_has_its_privileges(acting: As, role: str) -> None:
    with acting(role) as connection:
        for query in ALLOWED[role]:
            connection.execute(query)


@pytest.mark.parametrize("role", FORBIDDEN)
def test_a_role_lacks_other_privileges(acting: As, role: str) -> None:
    with acting(role) as connection:
        assert [q for q in FORBIDDEN[role] if is_allowed(connection, q)] == []


def is_allowed(connection: psycopg.Connection[Any], query: str) -> bool:
    """Return whether the session lacks no privilege for a statement."""
    try:
        connection.execute(query)
    except REFUSED:
        return False
    return True


def test_no_role_can_change_other_rows_or_columns(database_url: str) -> None:
    may = set()
    for relation, role, right in execute(database_url, DECLARED):
        if right not in ("SELECT", "EXECUTE", "USAGE"):
            may.add((role, right, relation))
    assert may == {
        (role, right, relation)
        for role, rights in CHANGES.items()
        for right, relations in rights.items()
        for relation in relations
    }
    columns = "SELECT fact FROM outbox.rights() WHERE relation = %s"
    for (role, table), names in UPDATED.items():
        start = f"right of pillarbox_{role} to UPDATE of "
        facts = [fact for (fact,) in execute(database_url, columns, (table,))]
        found = {f.removeprefix(start) for f in facts if f.startswith(start)}
        assert found == names, (role, table)


def test_only_who_runs_readers_or_consumers_can_read_contents_on_its_side(
    database_url: str,
) -> None:
    readers = execute(
        database_url,
        """
        SELECT DISTINCT substring(r.fact FROM '^right of pillarbox_(\\S+) to'),
               substring(r.relation FROM '^\\w+')
          FROM outbox.rights() AS r
          JOIN pg_class AS c ON c.oid::regclass::text = r.relation
          JOIN pg_attribute AS a ON a.attrelid = c.oid
         WHERE a.attname IN ('payload', 'headers', 'error_stacktrace', 'checkpoint')
           AND r.fact ~ (' to SELECT( of ' || a.attname || ')?$') ORDER BY 1
        """,
    )
    assert readers == [
        ("consumer", "inbox"),
        ("reader", "outbox"),
        ("relay", "outbox"),
    ]


def test_roles_of_others_may_not_even_enter_the_schemas(database_url: str) -> None:
    may = "SELECT has_schema_privilege('public', %s, 'USAGE, CREATE')"
    for schema in ("outbox", "inbox"):
        assert execute(database_url, may, [schema]) == [(False,)]


def test_only_job_roles_can_log_in_and_only_the_detacher_is_an_owner(
    acting: As,
) -> None:
    with acting("monitor") as anybody:
        roles = anybody.execute(
            "SELECT rolname FROM pg_roles WHERE rolname LIKE 'pillarbox\\_%' AND"
            " (rolcanlogin OR rolsuper OR rolcreaterole OR rolcreatedb"
            "  OR rolreplication OR rolbypassrls) ORDER BY 1"
        ).fetchall()
        members = anybody.execute(
            "SELECT r.rolname, m.rolname FROM pg_auth_members a"
            " JOIN pg_roles r ON r.oid = a.roleid JOIN pg_roles m ON m.oid = a.member"
            " WHERE r.rolname LIKE 'pillarbox\\_%' AND NOT m.rolsuper"
        ).fetchall()
    assert roles == [("pillarbox_detacher",), ("pillarbox_maintainer",)]
    assert sorted(members) == [
        ("pillarbox_monitor", "pillarbox_web"),
        ("pillarbox_owner", "pillarbox_detacher"),
        ("pillarbox_relay", "pillarbox_operator"),
    ]


def test_the_detacher_detaches_and_drops(acting: As) -> None:
    with acting("detacher") as detacher:
        for query in DETACH:
            detacher.execute(query)


def test_no_partition_or_template_has_a_grant_of_any_kind(acting: As) -> None:
    with acting("owner") as owner:
        granted = owner.execute(
            "SELECT c.oid::regclass FROM pg_class c"
            " WHERE c.relnamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace)"
            " AND (c.relispartition OR c.relname LIKE '%_template')"
            " AND (c.relacl IS NOT NULL OR EXISTS (SELECT FROM pg_attribute a"
            "      WHERE a.attrelid = c.oid AND a.attacl IS NOT NULL))"
        ).fetchall()
    assert granted == []


@pytest.mark.parametrize("count", [1, 3])
def test_the_application_adds_through_its_session(
    database_url: str, count: int
) -> None:
    engine = create_engine(sqlalchemy_url(database_url))
    with Session(engine) as session, session.begin():
        session.execute(text("SET LOCAL ROLE pillarbox_application"))
        pillarbox.add(session, *[Message("t", b"", key="k") for _ in range(count)])
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL ROLE pillarbox_application"))
        connection.execute(pillarbox.insert_statement(Message("t", b"")))
    engine.dispose()

    with psycopg.connect(database_url) as owner:
        row = owner.execute("SELECT count(*) FROM outbox.message").fetchone()
    assert row == (count + 1,)


def test_all_roles_are_in_one_list(database_url: str) -> None:
    assert {role for _, role, _ in execute(database_url, DECLARED)} == set(ROLES) - {
        "owner"
    }
    for file in ("roles.sql", "remove_roles.sql"):
        script = FOLDER.joinpath(file).read_text(encoding="utf-8")
        assert [role for role in ROLES if f"{{{role}_name}}" not in script] == []


def test_no_routine_that_writes_is_open_to_all(database_url: str) -> None:
    granted = {
        n for n, _, right in execute(database_url, DECLARED) if right == "EXECUTE"
    }
    is_open = "SELECT has_function_privilege('public', %s, 'EXECUTE')"

    assert [
        name for name in granted if execute(database_url, is_open, [name])[0][0]
    ] == ["inbox.moment_of(uuid)"]
