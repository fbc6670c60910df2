"""Lost roles and privileges are restored by the doctor's remedy or by migrating."""

from collections.abc import Iterator
from uuid import uuid4

import pytest

from outbox.administration.migrate import unmigrate
from outbox.cli.main import main
from outbox.errors import MigrationError
from outbox.testing.postgres import PostgresServer
from tests.fixtures.doctor import Doctor
from tests.fixtures.pasting import paste
from tests.fixtures.postgres import migrate_for_a_week, new_database, removal
from tests.fixtures.sessions import execute
from tests.migrations.catalog import drop_roles_of_jobs

pytestmark = pytest.mark.usefixtures("alone")

ADD = (
    "outbox.add(text,jsonb,text,text,jsonb,text,integer,text,timestamp with time zone,"
    "uuid)"
)
LOST = {
    **{
        f"the {role} is gone": (
            f"DROP OWNED BY {{0}}_{role}; DROP ROLE {{0}}_{role}",
            f"the role {{0}}_{role} doesn't exist",
        )
        for role in (
            *("maintainer", "detacher", "application", "relay", "consumer", "monitor"),
            "web",
        )
    },
    "the maintainer may not log in": (
        "ALTER ROLE {0}_maintainer NOLOGIN",
        "{0}_maintainer may not log in",
    ),
    "the detacher may not log in": (
        "ALTER ROLE {0}_detacher NOLOGIN",
        "{0}_detacher may not log in",
    ),
    "the detacher is no member of the owner": (
        "REVOKE {0}_owner FROM {0}_detacher",
        "{0}_detacher lacks the privileges of {0}_owner",
    ),
    "the relay may not read": (
        "REVOKE SELECT ON outbox.message FROM {0}_relay",
        "{0}_relay lacks privileges on outbox.message",
    ),
    "the relay may not write one column": (
        "REVOKE UPDATE (status) ON outbox.dead_letter FROM {0}_relay",
        "{0}_relay lacks privileges on outbox.dead_letter",
    ),
    "the application may not enter": (
        "REVOKE USAGE ON SCHEMA outbox FROM {0}_application",
        "{0}_application lacks privileges on outbox",
    ),
    "the application may not number": (
        "REVOKE USAGE ON SEQUENCE outbox.message_seq FROM {0}_application",
        "{0}_application lacks privileges on outbox.message_seq",
    ),
    "the application may not add": (
        f"REVOKE EXECUTE ON FUNCTION {ADD} FROM {{0}}_application",
        f"{{0}}_application lacks privileges on {ADD}",
    ),
    "the consumer has nothing": (
        "REVOKE ALL ON ALL TABLES IN SCHEMA inbox FROM {0}_consumer",
        '{0}_consumer lacks privileges on inbox."position", inbox.base, ',
    ),
    "the maintainer may not maintain": (
        "REVOKE EXECUTE ON PROCEDURE outbox.maintain(timestamptz) FROM {0}_maintainer",
        "{0}_maintainer lacks privileges on outbox.maintain(timestamp with time zone)",
    ),
    "the owner may not use pg_partman": (
        "REVOKE ALL ON ALL TABLES IN SCHEMA partman FROM {0}_owner",
        "{0}_owner lacks privileges on pg_partman",
    ),
    "anybody may maintain": (
        "GRANT EXECUTE ON PROCEDURE outbox.maintain(timestamptz) TO PUBLIC",
        "any role may run outbox.maintain(timestamp with time zone)",
    ),
}
TOGETHER = (
    [lost for lost in LOST if lost.endswith("is gone")],
    [
        *("the maintainer may not log in", "the detacher may not log in"),
        *("the detacher is no member of the owner", "anybody may maintain"),
    ],
    [
        *("the relay may not read", "the application may not enter"),
        *("the consumer has nothing", "the maintainer may not maintain"),
        "the owner may not use pg_partman",
    ],
    ["the relay may not write one column", "the application may not number"],
    ["the application may not add"],
)
"""Losses with remedies of one kind, and in separate findings."""
RIGHTS = """
    SELECT o.what, o.name, a.grantee::regrole::text, a.privilege_type
      FROM (SELECT 'schema', nspname::text, nspacl, nspowner FROM pg_namespace
            UNION ALL
            SELECT 'routine', oid::regprocedure::text, proacl, proowner FROM pg_proc
            UNION ALL
            SELECT 'table', oid::regclass::text, relacl, relowner FROM pg_class
            UNION ALL
            SELECT 'column', attrelid::regclass || '.' || attname, attacl, NULL
              FROM pg_attribute) AS o (what, name, acl, owner),
           aclexplode(o.acl) AS a
     WHERE a.grantee IS DISTINCT FROM o.owner
    UNION
    SELECT 'role', rolname, rolcanlogin::text,
           pg_has_role(rolname, %s, 'USAGE')::text FROM pg_roles
"""


@pytest.fixture(scope="module")
def prefix() -> str:
    """The prefix of roles that no other test uses."""
    return f"lost_{uuid4().hex[:8]}"


@pytest.fixture(scope="module")
def url(server: PostgresServer, prefix: str) -> Iterator[str]:
    """One database for all tests: each repairs what it breaks."""
    with new_database(server, "pillarbox_lost") as name:
        url = server.database_url(name)
        migrate_for_a_week(url, role_prefix=prefix)
        yield url
        unmigrate(url, role_prefix=prefix)
        drop_roles_of_jobs(url, prefix)


def test_each_loss_belongs_to_one_group() -> None:
    assert sorted(lost for group in TOGETHER for lost in group) == sorted(LOST)


@pytest.mark.parametrize("group", TOGETHER, ids=lambda group: group[0])
def test_the_doctors_remedies_restore_each_loss(
    group: list[str], url: str, prefix: str, doctor: Doctor
) -> None:
    before = set(execute(url, RIGHTS, (f"{prefix}_owner",)))
    for lost in group:
        execute(url, LOST[lost][0].format(prefix))

    status, findings = doctor(url)
    assert status == 3
    for lost in group:
        about = LOST[lost][1].format(prefix)
        found = [f for f in findings if about in f["finding"]]
        assert found, (lost, findings)
        severity = "warning" if lost == "anybody may maintain" else "error"
        assert {f["severity"] for f in found} == {severity}, lost
    remedies = list(dict.fromkeys(f["remedy"] for f in findings))
    # None of them restores what another one should.
    assert len({it.startswith("pillarbox migrate") for it in remedies}) == 1
    for remedy in remedies:
        paste(url, remedy)

    assert doctor(url)[1] == []
    assert set(execute(url, RIGHTS, (f"{prefix}_owner",))) == before


@pytest.mark.parametrize("kind", ["roles", "rights"])
def test_the_next_migration_restores_everything(
    kind: str, url: str, prefix: str, doctor: Doctor
) -> None:
    before = set(execute(url, RIGHTS, (f"{prefix}_owner",)))
    for lost, (breaking, _) in LOST.items():
        if lost.endswith("is gone") == (kind == "roles"):
            execute(url, breaking.format(prefix))
    assert doctor(url)[0] == 3

    migrate_for_a_week(url, role_prefix=prefix)

    assert doctor(url)[1] == []
    assert set(execute(url, RIGHTS, (f"{prefix}_owner",))) == before


def test_an_owner_that_can_log_in_is_found(
    url: str, prefix: str, doctor: Doctor
) -> None:
    execute(url, f"ALTER ROLE {prefix}_owner LOGIN")
    status, (found,) = doctor(url)
    assert status == 1

    paste(url, found["remedy"])

    assert doctor(url)[1] == []


def test_a_migration_with_another_prefix_is_refused(url: str, prefix: str) -> None:
    with pytest.raises(MigrationError, match=f"add --role-prefix {prefix}"):
        migrate_for_a_week(url, role_prefix="other")
    assert main(removal(url)) == 2

    roles = "SELECT rolname FROM pg_roles WHERE rolname LIKE 'other%'"
    assert execute(url, roles) == []


def test_everything_is_removed_although_a_role_is_gone(
    server: PostgresServer,
) -> None:
    with new_database(server, "pillarbox_lost") as name:
        other = server.database_url(name)
        migrate_for_a_week(other, role_prefix="half")
        execute(other, "DROP OWNED BY half_maintainer; DROP ROLE half_maintainer")

        unmigrate(other, role_prefix="half")

        drop_roles_of_jobs(other, "half")


def test_a_migration_revokes_earlier_grants(database_url: str) -> None:
    """Earlier versions let these roles update every column."""
    for schema, role in (("outbox", "relay"), ("inbox", "consumer")):
        execute(
            database_url,
            "SET ROLE pillarbox_owner;"
            f" GRANT UPDATE, DELETE ON {schema}.dead_letter TO pillarbox_{role}",
        )

    migrate_for_a_week(database_url)

    for schema, role in (("outbox", "relay"), ("inbox", "consumer")):
        ((row, payload, status),) = execute(
            database_url,
            "SELECT has_table_privilege(r, t, 'UPDATE, DELETE'),"
            " has_column_privilege(r, t, 'payload', 'UPDATE'),"
            " has_column_privilege(r, t, 'status', 'UPDATE')"
            f" FROM (VALUES ('pillarbox_{role}', '{schema}.dead_letter')) AS v (r, t)",
        )
        assert (row, payload, status) == (False, False, True), role
