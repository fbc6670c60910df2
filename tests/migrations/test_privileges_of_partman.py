"""The privileges on pg_partman that pillarbox's roles get, and who can grant them.

The migrating role needn't be a superuser, which managed services don't offer.
"""

from collections.abc import Iterator
from typing import Final, TypedDict

import pytest

from pillarbox.outbox.administration.migrate import unmigrate
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.errors import MigrationError
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.doctor import Doctor
from tests.fixtures.pasting import paste
from tests.fixtures.postgres import migrate_for_a_week
from tests.fixtures.roles import new_role
from tests.fixtures.sessions import execute
from tests.migrations.catalog import drop_roles_of_jobs, is_empty, snapshot
from tests.outbox.administration.retiring import EXPIRED
from tests.outbox.administration.test_upkeep import old_partition

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.timeout(300)]


class Names(TypedDict):
    """Arguments of `migrate` and `unmigrate`."""

    role_prefix: str
    partman_schema: str


NAMES: Final[Names] = {"role_prefix": "shared", "partman_schema": "public"}
THEIRS: Final = """
REVOKE CREATE ON SCHEMA public FROM PUBLIC;
CREATE EXTENSION pg_partman SCHEMA public;
CREATE TABLE public.salary (name text, amount numeric);
CREATE VIEW public.highest AS SELECT max(amount) FROM public.salary;
CREATE FUNCTION public.raise_all() RETURNS void LANGUAGE sql AS '';
REVOKE ALL ON FUNCTION public.raise_all() FROM PUBLIC;
"""
# Privileges of pillarbox's roles in public, on the extension's objects or on others.
RIGHTS: Final = """
SELECT a.grantee::regrole::text, o.name, a.privilege_type
  FROM (SELECT 'pg_class'::regclass, oid, relnamespace, oid::regclass::text, relacl
          FROM pg_class
         UNION ALL
        SELECT 'pg_proc'::regclass, oid, pronamespace, oid::regprocedure::text, proacl
          FROM pg_proc) AS o (class, oid, schema, name, acl),
       aclexplode(o.acl) AS a
 WHERE o.schema = 'public'::regnamespace AND a.grantee <> 0
   AND a.grantee::regrole::text LIKE 'shared%%'
   AND EXISTS (SELECT FROM pg_depend d WHERE d.classid = o.class AND d.objid = o.oid
                  AND d.deptype = 'e') = %s
 ORDER BY 1, 2, 3
"""
MAY: Final = "SELECT has_table_privilege('shared_{}', 'public.salary', '{}')"


def test_pillarboxs_roles_can_use_only_the_extension(
    empty_database_url: str, server: PostgresServer, doctor: Doctor
) -> None:
    shared = empty_database_url
    execute(shared, THEIRS)
    with pytest.raises(MigrationError, match="--partman-schema public"):
        migrate_for_a_week(shared, role_prefix="shared")
    migrate_for_a_week(shared, **NAMES)

    assert execute(shared, RIGHTS, (False,)) == []
    for role, right in (("owner", "DELETE"), ("detacher", "UPDATE")):
        assert execute(shared, MAY.format(role, right)) == [(False,)]
    execute(shared, "UPDATE outbox.partition_policy SET premake = 10")
    execute(f"{shared}?options=-crole%3Dshared_maintainer", "CALL outbox.maintain()")
    assert execute(shared, "SELECT min(ahead) FROM outbox.partition_health") == [(10,)]
    # The doctor asks only for the extension's privileges.
    assert doctor(shared) == (0, [])
    execute(shared, "REVOKE ALL ON public.part_config FROM shared_owner")
    (found,) = (f for f in doctor(shared)[1] if f["check"] == "grants")
    paste(shared, found["remedy"])
    assert doctor(shared) == (0, [])
    execute(
        shared,
        "GRANT SELECT ON public.salary TO shared_owner, shared_monitor;"
        " GRANT EXECUTE ON FUNCTION public.raise_all() TO shared_owner;"
        " GRANT CREATE ON SCHEMA public TO shared_owner",
    )
    granted = execute(shared, RIGHTS, (False,))
    assert len(granted) == 3

    unmigrate(shared, **NAMES)

    assert is_empty(snapshot(shared))
    assert execute(shared, RIGHTS, (True,)) == []
    # Grants by others survive a removal.
    assert execute(shared, RIGHTS, (False,)) == granted
    may = "SELECT has_schema_privilege('shared_owner', 'public', 'CREATE')"
    assert execute(shared, may) == [(True,)]
    execute(shared, "DROP OWNED BY shared_owner, shared_monitor")
    execute(server.url, "DROP ROLE shared_owner, shared_monitor")
    drop_roles_of_jobs(shared, "shared")


WITH_GRANT_OPTION = """
CREATE SCHEMA partman;
CREATE EXTENSION pg_partman SCHEMA partman;
GRANT USAGE ON SCHEMA partman TO administrator WITH GRANT OPTION;
GRANT ALL ON ALL TABLES IN SCHEMA partman TO administrator WITH GRANT OPTION;
GRANT ALL ON ALL FUNCTIONS IN SCHEMA partman TO administrator WITH GRANT OPTION;
GRANT ALL ON ALL PROCEDURES IN SCHEMA partman TO administrator WITH GRANT OPTION;
-- The administrator needs no privileges on other objects in that schema.
CREATE TABLE partman.salary (name text, amount numeric);
"""


@pytest.fixture
def administrator(empty_database_url: str) -> Iterator[str]:
    """The empty database, as a role that may create roles and schemas."""
    name = empty_database_url.rpartition("/")[2].partition("?")[0]
    with new_role(empty_database_url, "administrator", "LOGIN CREATEROLE") as role:
        grant = f'GRANT CREATE ON DATABASE "{name}" TO {role}'
        execute(empty_database_url, f"{grant}; {WITH_GRANT_OPTION}")
        yield empty_database_url.replace("postgres@", f"{role}@")


def test_a_role_with_createrole_migrates_maintains_and_removes(
    administrator: str, empty_database_url: str
) -> None:
    migrate_for_a_week(administrator, role_prefix="theirs")
    first = snapshot(empty_database_url)
    migrate_for_a_week(administrator, role_prefix="theirs")
    assert snapshot(empty_database_url) == first

    assert main(["maintain", "--database", administrator]) == 0
    ((ahead,),) = execute(
        administrator, "SELECT min(ahead) FROM outbox.partition_health"
    )
    assert ahead >= 7

    unmigrate(administrator, role_prefix="theirs")
    found = snapshot(empty_database_url)
    assert is_empty(found)
    drop_roles_of_jobs(empty_database_url, "theirs")


def test_a_member_without_set_role_is_told_who_may_detach(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ((version,),) = execute(database_url, "SHOW server_version_num")
    if int(version) < 160000:
        pytest.skip("every member may become the owner before PostgreSQL 16")
    member = "LOGIN IN ROLE pillarbox_maintainer"
    with new_role(database_url, "scheduler", member) as scheduler:
        execute(database_url, f"GRANT pillarbox_owner TO {scheduler} WITH SET FALSE")
        old_partition(database_url)
        theirs = database_url.replace("postgres@", f"{scheduler}@")

        assert main(["maintain", "--database", theirs]) == 2

        assert len(execute(database_url, EXPIRED)) == 1
        assert "can SET ROLE pillarbox_owner" in capsys.readouterr().err
