"""pg_partman in a schema that it shares with tables of others."""

import json
from collections.abc import Iterator
from typing import Final, TypedDict

import pytest

from outbox.administration.migrate import unmigrate
from outbox.cli.main import main
from outbox.errors import MigrationError
from outbox.testing.postgres import PostgresServer
from tests.fixtures.pasting import paste
from tests.fixtures.postgres import migrate_for_a_week
from tests.fixtures.sessions import execute
from tests.migrations.catalog import is_empty, snapshot

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


@pytest.fixture
def shared(server: PostgresServer, empty_database_url: str) -> Iterator[str]:
    execute(empty_database_url, THEIRS)
    yield empty_database_url
    execute(server.url, "DROP ROLE IF EXISTS shared_maintainer, shared_detacher")


def test_pillarboxs_roles_can_use_only_the_extension(
    shared: str, server: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(MigrationError, match="--partman-schema public"):
        migrate_for_a_week(shared, role_prefix="shared")
    migrate_for_a_week(shared, **NAMES)

    assert execute(shared, RIGHTS, (False,)) == []
    for role, right in (("owner", "DELETE"), ("detacher", "UPDATE")):
        assert execute(shared, MAY.format(role, right)) == [(False,)]
    call_as_the_maintainer(shared)
    assert execute(shared, "SELECT min(ahead) FROM outbox.partition_health") == [(10,)]
    the_doctor_asks_only_for_the_extensions_privileges(shared, capsys)
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


def the_doctor_asks_only_for_the_extensions_privileges(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--json", "--database", url]) == 0
    # Every role may connect to a test's database, and no relay is running.
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [f for f in findings if f["severity"] != "hint"] == []

    execute(url, "REVOKE ALL ON public.part_config FROM shared_owner")
    assert main(["doctor", "--json", "--database", url]) == 3
    findings = json.loads(capsys.readouterr().out)["findings"]
    (found,) = (f for f in findings if f["check"] == "grants")
    paste(url, found["remedy"])
    assert main(["doctor", "--database", url]) == 0


def call_as_the_maintainer(url: str) -> None:
    execute(url, "UPDATE outbox.partition_policy SET premake = 10")
    execute(f"{url}?options=-crole%3Dshared_maintainer", "CALL outbox.maintain()")


def test_an_administrator_without_table_privileges_migrates(
    shared: str, server: PostgresServer
) -> None:
    execute(server.url, "CREATE ROLE shared_chief LOGIN CREATEROLE")
    name = shared.rpartition("/")[2]
    execute(
        shared,
        f'GRANT CREATE ON DATABASE "{name}" TO shared_chief;'
        " GRANT USAGE ON SCHEMA public TO shared_chief WITH GRANT OPTION;"
        " DO $$ DECLARE o record; BEGIN FOR o IN SELECT d.classid, d.objid FROM"
        " pg_depend d JOIN pg_extension e ON e.oid = d.refobjid AND d.deptype = 'e'"
        " WHERE e.extname = 'pg_partman' AND d.classid IN ('pg_class'::regclass,"
        " 'pg_proc'::regclass) LOOP EXECUTE CASE o.classid WHEN 'pg_class'::regclass"
        " THEN format('GRANT ALL ON TABLE %s', o.objid::regclass) ELSE"
        " format('GRANT ALL ON ROUTINE %s', o.objid::regprocedure) END ||"
        " ' TO shared_chief WITH GRANT OPTION'; END LOOP; END $$",
    )
    chief = shared.replace("postgres@", "shared_chief@")
    try:
        migrate_for_a_week(chief, **NAMES)
        call_as_the_maintainer(shared)
        unmigrate(chief, **NAMES)
        assert is_empty(snapshot(shared))
    finally:
        execute(shared, "DROP OWNED BY shared_chief CASCADE")
        execute(server.url, "DROP ROLE shared_chief")
