"""Lost roles and privileges are restored by the doctor's remedy or by migrating."""

import re
from collections.abc import Iterator
from uuid import uuid4

import pytest

from pillarbox.outbox.administration.migrate import unmigrate
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.errors import MigrationError
from pillarbox.outbox.testing.postgres import PostgresServer
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
GONE = {
    f"the {role} is gone": (
        f"DROP OWNED BY {{0}}_{role}; DROP ROLE {{0}}_{role}",
        f"the role {{0}}_{role} doesn't exist",
    )
    for role in (
        *("maintainer", "detacher", "application", "relay", "consumer", "monitor"),
        "web",
    )
}
REVOKED = {
    "the relay may not read": (
        "REVOKE SELECT ON outbox.message FROM {0}_relay",
        "{0}_relay lacks privileges on .*outbox.message",
    ),
    "the relay may not write one column": (
        "REVOKE UPDATE (status) ON outbox.dead_letter FROM {0}_relay",
        "{0}_relay lacks privileges on .*outbox.dead_letter",
    ),
    "the application may not enter": (
        "REVOKE USAGE ON SCHEMA outbox FROM {0}_application",
        "{0}_application lacks privileges on outbox,",
    ),
    "the application may not number": (
        "REVOKE USAGE ON SEQUENCE outbox.message_seq FROM {0}_application",
        "{0}_application lacks privileges on .*outbox.message_seq",
    ),
    "the application may not add": (
        f"REVOKE EXECUTE ON FUNCTION {ADD} FROM {{0}}_application",
        f"{{0}}_application lacks privileges on .*{re.escape(ADD)}",
    ),
    "the consumer has nothing": (
        "REVOKE ALL ON ALL TABLES IN SCHEMA inbox FROM {0}_consumer",
        "{0}_consumer lacks privileges on inbox.dead_letter, inbox.foreign",
    ),
    "the maintainer may not maintain": (
        "REVOKE EXECUTE ON PROCEDURE outbox.maintain(timestamptz) FROM {0}_maintainer",
        "{0}_maintainer lacks privileges on outbox.maintain",
    ),
    "the owner may not use pg_partman": (
        "REVOKE ALL ON ALL TABLES IN SCHEMA partman FROM {0}_owner",
        "{0}_owner lacks privileges on pg_partman",
    ),
}
OTHERWISE = {
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
    "anybody may maintain": (
        "GRANT EXECUTE ON PROCEDURE outbox.maintain(timestamptz) TO PUBLIC",
        "any role may run outbox.maintain",
    ),
}
"""Losses with remedies of their own, which a migration restores, too."""
LESS_THAN_ERRORS = ("anybody may maintain", "the owner may log in")
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


@pytest.mark.parametrize(
    ("losses", "is_migrated"),
    [(GONE, True), (REVOKED, True), (OTHERWISE, False), (OTHERWISE, True)],
    ids=["gone", "revoked", "by remedies", "by a migration"],
)
def test_each_loss_is_found_and_restored(
    losses: dict[str, tuple[str, str]],
    is_migrated: bool,
    url: str,
    prefix: str,
    doctor: Doctor,
) -> None:
    before = set(execute(url, RIGHTS, (f"{prefix}_owner",)))
    for breaking, _ in losses.values():
        execute(url, breaking.format(prefix))

    status, findings = doctor(url)
    assert status == 3
    for lost, (_, finding) in losses.items():
        about = re.compile(finding.format(prefix))
        severities = {f["severity"] for f in findings if about.search(f["finding"])}
        assert severities == {"warning" if lost in LESS_THAN_ERRORS else "error"}, lost
    remedies = {f["remedy"] for f in findings}
    if losses is REVOKED:  # a migration also revokes what was granted
        grant = "GRANT UPDATE, DELETE ON outbox.dead_letter"
        execute(url, f"{grant} TO {prefix}_relay, {prefix}_consumer")
    if losses in (GONE, REVOKED):
        assert remedies == {f"pillarbox migrate --role-prefix {prefix} --without-cron"}
    if is_migrated:
        migrate_for_a_week(url, role_prefix=prefix)
    else:
        for remedy in remedies:
            paste(url, remedy)

    assert doctor(url)[1] == []
    assert set(execute(url, RIGHTS, (f"{prefix}_owner",))) == before


def test_an_owner_that_may_log_in_is_reported_and_could_become_a_superuser(
    url: str, prefix: str, doctor: Doctor
) -> None:
    execute(url, f"ALTER ROLE {prefix}_owner LOGIN")

    found = {f["check"]: f for f in doctor(url)[1]}
    assert found.keys() == {"superuser", "roles"}
    may = f"{prefix}_owner may log in, and could then change and drop everything"
    assert may in found["roles"]["finding"]

    paste(url, found["roles"]["remedy"])
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
