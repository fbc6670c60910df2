"""SECURITY DEFINER functions are not affected by the caller's search_path."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from outbox.testing.postgres import PostgresServer
from tests.fixtures.postgres import Template, new_database
from tests.fixtures.sessions import execute
from tests.outbox.administration.test_upkeep import add_old, old_partition

pytestmark = pytest.mark.timeout(300)

_BEAT = (
    "{}.beat(uuid,text,text,text,text,timestamp with time zone,text,integer,integer,"
    "boolean)"
)
_CALL = (
    "SELECT {}.beat('00000000-0000-0000-0000-000000000000',"
    " 'k', 'n', 'h', 'b', NULL, NULL, 0, 0, false)"
)
# SECURITY DEFINER functions, each with a role that may call it.
DEFINERS = {
    "outbox.make_partitions(text)": (
        *("maintainer", "SELECT outbox.make_partitions('outbox.message')"),
    ),
    "outbox.make_days()": ("relay", "SELECT * FROM outbox.make_days()"),
    _BEAT.format("outbox"): ("relay", _CALL.format("outbox")),
    _BEAT.format("inbox"): ("consumer", _CALL.format("inbox")),
    "outbox.set_interval(text,interval,integer)": (
        "owner",
        "SELECT outbox.set_interval('outbox.message', '1 hour', 48)",
    ),
    "outbox.trim_batch(text)": (
        *("maintainer", "SELECT outbox.trim_batch('outbox.operation')"),
    ),
    "outbox.note_failure(text,text,text,text,text,text)": (
        *("maintainer", "SELECT outbox.note_failure('x')"),
    ),
    "outbox.end_upkeep(timestamp with time zone,boolean)": (
        *("maintainer", "SELECT outbox.end_upkeep('2026-01-01', true)"),
    ),
    "outbox.accept_clock()": ("maintainer", "SELECT outbox.accept_clock()"),
    "outbox.is_followed(text,timestamp with time zone,timestamp with time zone)": (
        *(
            "monitor",
            "SELECT outbox.is_followed('outbox.position', '-infinity', 'infinity')",
        ),
    ),
    "outbox.upkeep_plan(text)": ("monitor", "SELECT * FROM outbox.upkeep_plan()"),
    "outbox.finish_detached(text)": (
        *("maintainer", "SELECT * FROM outbox.finish_detached('outbox.message')"),
    ),
}
# Not SECURITY DEFINER, but called by one role while another's objects shadow names.
OTHERS = {
    "outbox.add": ("application", "SELECT outbox.add('t', '{}'::jsonb, key => 'k')"),
    "outbox.partition_health": ("monitor", "TABLE outbox.partition_health"),
}
PATHS = ["pg_temp, evil, pg_catalog", "evil, pg_catalog, public"]

LIST_DEFINERS = """
SELECT p.oid::regprocedure::text, p.proconfig[1] FROM pg_proc p
 WHERE p.prosecdef
   AND p.pronamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace)
"""
SOURCES = """
SELECT string_agg(pg_get_functiondef(p.oid), ' ') FROM pg_proc p
 WHERE p.pronamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace)
"""
# The error names the role that hits a trap. Functions that need C are left out.
TRAPS = r"""
CREATE SCHEMA evil;
CREATE FUNCTION evil.bait() RETURNS boolean LANGUAGE plpgsql
AS $f$BEGIN RAISE EXCEPTION 'trapped as %', current_user; END$f$;
DO $do$
DECLARE
    o record;
    v_body text := 'LANGUAGE plpgsql AS ''BEGIN PERFORM evil.bait(); END''';
BEGIN
    FOR o IN
        SELECT p.proname, pg_get_function_identity_arguments(p.oid) AS arguments,
               pg_get_function_result(p.oid) AS result
          FROM pg_proc p
         WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.prokind IN ('f', 'a')
           AND p.proname = ANY (string_to_array({names}, ','))
    LOOP
        BEGIN
            EXECUTE format('CREATE FUNCTION evil.%I(%s) RETURNS %s ', o.proname,
                           o.arguments, o.result) || v_body;
        EXCEPTION WHEN OTHERS THEN CONTINUE;
        END;
    END LOOP;
    FOR o IN
        SELECT row_number() OVER () AS n, oprname, oprleft::regtype AS l,
               oprright::regtype AS r, oprresult::regtype AS result
          FROM pg_operator
         WHERE oprleft <> 0 AND oprname IN ('=', '<>', '<', '>', '<=', '>=', '+', '-',
                                            '*', '||', '~', '&', '>>')
    LOOP
        BEGIN
            EXECUTE format('CREATE FUNCTION evil.operator_%s(%s, %s) RETURNS %s ',
                           o.n, o.l, o.r, o.result) || v_body;
            EXECUTE format('CREATE OPERATOR evil.%s (LEFTARG = %s, RIGHTARG = %s,'
                ' FUNCTION = evil.operator_%s)', o.oprname, o.l, o.r, o.n);
        EXCEPTION WHEN OTHERS THEN CONTINUE;
        END;
    END LOOP;
    FOR o IN
        SELECT n.nspname, c.relname, place
          FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace,
               unnest(ARRAY['evil', 'pg_temp']) AS place
         WHERE c.relkind IN ('r', 'v', 'p') AND NOT c.relispartition
           AND (n.nspname IN ('outbox', 'inbox', 'partman')
                OR n.nspname = 'pg_catalog'
               AND c.relname = ANY (string_to_array({names}, ',')))
    LOOP
        BEGIN
            EXECUTE format('CREATE OR REPLACE VIEW %s.%I AS'
                ' SELECT t.* FROM %I.%I t WHERE evil.bait()',
                o.place, o.relname, o.nspname, o.relname);
        EXCEPTION WHEN invalid_table_definition THEN CONTINUE;
        END;
        EXECUTE format('GRANT ALL ON %s.%I TO PUBLIC', o.place, o.relname);
    END LOOP;
END
$do$;
GRANT USAGE ON SCHEMA evil TO PUBLIC;
"""


@contextmanager
def trapped(url: str) -> Iterator[psycopg.Connection[Any]]:
    """Open a session with a trap for every name that pillarbox's routines use."""
    old_partition(url, 20)
    old_partition(url, 25)
    add_old(url, 25)
    ((sources,),) = execute(url, SOURCES)
    names = ",".join(sorted(set(re.findall(r"[a-z_]\w*", sources))))
    with psycopg.connect(url, autocommit=True) as connection:
        traps = TRAPS.replace("{names}", f"'{names}'")
        connection.execute(traps.encode())
        yield connection


@pytest.fixture(scope="module")
def session(
    server: PostgresServer, template: Template
) -> Iterator[psycopg.Connection[Any]]:
    with (
        new_database(server, "pillarbox_test", template) as name,
        trapped(server.database_url(name)) as connection,
    ):
        yield connection


@pytest.fixture
def hostile(
    session: psycopg.Connection[Any],
) -> Iterator[psycopg.Connection[Any]]:
    """The session with traps, in a transaction that is rolled back afterwards."""
    with session.transaction(force_rollback=True):
        yield session


def act(connection: psycopg.Connection[Any], role: str, path: str) -> None:
    connection.execute(f"SET SESSION AUTHORIZATION pillarbox_{role}")
    connection.execute(f"SET search_path = {path}")


def test_every_definer_function_is_tested_and_has_a_pinned_path(
    database_url: str,
) -> None:
    found = dict(execute(database_url, LIST_DEFINERS))

    assert set(found) == set(DEFINERS)
    assert set(found.values()) == {"search_path=pg_catalog, pg_temp"}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("routine", [*DEFINERS, *OTHERS])
def test_no_routine_calls_a_shadowing_function(
    routine: str, path: str, hostile: psycopg.Connection[Any]
) -> None:
    role, call = {**DEFINERS, **OTHERS}[routine]
    act(hostile, role, path)

    assert hostile.execute(call).fetchall() is not None


@pytest.mark.parametrize("path", PATHS)
def test_a_definer_function_without_a_pinned_path_calls_a_trap(
    path: str, hostile: psycopg.Connection[Any]
) -> None:
    hostile.execute("ALTER FUNCTION outbox.upkeep_plan(text) RESET search_path")
    act(hostile, "monitor", path)

    with pytest.raises(psycopg.errors.RaiseException, match="trapped as pillarbox_own"):
        hostile.execute("SELECT * FROM outbox.upkeep_plan()")
