"""Each role has the privileges that it needs and no others, as statements show."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

import pillarbox
from outbox.postgres.connection import sqlalchemy_url
from outbox.testing.postgres import PostgresServer
from pillarbox import Message
from tests.fixtures.postgres import Template, new_database
from tests.migrations.rights import ADD, ALLOWED, DETACH, FORBIDDEN, ON_A_PARTITION

As: TypeAlias = Callable[[str], AbstractContextManager[psycopg.Connection[Any]]]
REFUSED = psycopg.errors.InsufficientPrivilege


def pairs(table: dict[str, list[str]]) -> list[Any]:
    return [
        pytest.param(role, query, id=f"{role}: {' '.join(query.split())[:60]}")
        for role, queries in table.items()
        for query in queries
    ]


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


@pytest.mark.parametrize(("role", "query"), pairs(ALLOWED))
def test_a_role_has_its_privileges(acting: As, role: str, query: str) -> None:
    with acting(role) as connection:
        connection.execute(query)


@pytest.mark.parametrize(("role", "query"), pairs(FORBIDDEN))
def test_a_role_lacks_other_privileges(acting: As, role: str, query: str) -> None:
    with acting(role) as connection, pytest.raises(REFUSED):
        connection.execute(query)


@pytest.mark.parametrize("role", sorted(ALLOWED.keys() - {"detacher"}))
@pytest.mark.parametrize("query", ON_A_PARTITION)
def test_a_role_may_not_touch_a_partition_directly(
    acting: As, role: str, query: str
) -> None:
    with acting("owner") as owner:
        newest = owner.execute(
            "SELECT p.parent_table, p.control, max(x.partition::text) FROM"
            " outbox.partition_policy p, outbox.partitions(p.parent_table) x"
            " GROUP BY p.parent_table"
        ).fetchall()
    assert len(newest) == 11

    with acting(role) as connection:
        for parent, control, partition in newest:
            names = {"parent": parent, "control": control, "partition": partition}
            with pytest.raises(REFUSED):
                connection.execute(query.format(**names))


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


def test_other_roles_have_no_privileges(database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE ROLE nobody_in_particular")
        try:
            connection.execute("SET SESSION AUTHORIZATION nobody_in_particular")
            for query in (ADD, "SELECT * FROM outbox.message", "TABLE inbox.receipt"):
                with pytest.raises(REFUSED):
                    connection.execute(query)
        finally:
            connection.execute("RESET SESSION AUTHORIZATION")
            connection.execute("DROP ROLE nobody_in_particular")


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
