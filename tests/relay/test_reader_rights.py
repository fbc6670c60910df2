"""A role runs the readers that are its own, and changes nothing of others'."""

from collections.abc import Iterator
from typing import Any, Final

import psycopg
import pytest

from pillarbox import Message
from pillarbox.outbox.administration.connection import administration
from pillarbox.outbox.administration.readers import add_reader, list_readers
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.lane import LANES
from pillarbox.outbox.postgres.connection import PIN_SESSION
from pillarbox.outbox.postgres.sql_files import load
from pillarbox.relay.events import DatabaseLost, LeaseLost, MessageDeadLettered
from pillarbox.relay.publisher import Nacked
from tests.fixtures import positions
from tests.fixtures.doctor import Doctor
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import insert, running
from tests.fixtures.roles import login, new_role
from tests.fixtures.sessions import execute
from tests.fixtures.web import as_role
from tests.relay.test_sharing import wait_until_held

REFUSED = psycopg.errors.InsufficientPrivilege
BROKER: Final = "redis://b"
POSITION = """
    INSERT INTO outbox.position (created_at, ends_at, number, up_to, messages, lane,
                                 reader, snapshot)
    SELECT date_trunc('day', now(), 'UTC'), now(), 1, 1, 1, lane, reader, '1:1:'
      FROM unnest(%s::text[]) WITH ORDINALITY AS r (reader, lane)
"""
ENTRY = """
    INSERT INTO outbox.deferral (created_at, due_at, seq, id, lane, cause, reader)
    SELECT now(), now(), 1, gen_random_uuid(), 0, 'refused', reader
      FROM unnest(%s::text[]) AS r (reader)
"""
END = """
    WITH ended AS (
        INSERT INTO outbox.deferral (created_at, seq, id, lane, cause, reader)
        SELECT now(), 1, gen_random_uuid(), 0, 'settled', reader
          FROM unnest(%s::text[]) AS r (reader)
            ON CONFLICT DO NOTHING
     RETURNING reader
    )
    SELECT reader FROM ended
"""
DEAD_LETTER = """
    INSERT INTO outbox.dead_letter (origin, message_id, topic, attempts,
        schema_version, content_type, headers, payload, error_reason)
    SELECT 'relay:' || reader, 'm', 't', 1, 1, 'text/plain', '{}', '', 'why'
      FROM unnest(%s::text[]) AS r (reader)
"""
STORED = """
    SELECT reader FROM outbox.position UNION ALL SELECT reader FROM outbox.deferral
     UNION ALL SELECT substring(origin FROM 7) FROM outbox.dead_letter
"""
DISABLED = (
    "UPDATE outbox.reader SET role = 'bob'",
    "UPDATE outbox.reader SET broker = 'redis://mine'",
    "UPDATE outbox.subscription SET ended_at = now()",
    "INSERT INTO outbox.reader (reader) VALUES ('mine')",
    "UPDATE outbox.dead_letter SET status = 'SUCCEEDED'",
    "DELETE FROM outbox.position",
    "SET session_replication_role = replica",
    "SET ROLE pillarbox_relay",
    "SET ROLE alice",
)


def add(url: str, name: str, role: str | None) -> None:
    with administration(url, application_name="test") as connection:
        add_reader(connection, name, ["*"], broker=BROKER, role=role)


@pytest.fixture
def bob(database_url: str) -> Iterator[str]:
    """The URL of bob, who may run the reader billing; audit is alice's."""
    in_role = "LOGIN IN ROLE pillarbox_reader"
    with (
        new_role(database_url, "bob", in_role),
        new_role(database_url, "alice", in_role),
    ):
        add(database_url, "billing", "bob")
        add(database_url, "audit", "alice")
        yield login(database_url, "bob")


@pytest.mark.parametrize("row_security", ["on", "off"])
@pytest.mark.parametrize(
    "statement",
    [POSITION, ENTRY, END, DEAD_LETTER],
    ids=["position", "entry", "end of a run", "dead letter"],
)
def test_a_role_stores_only_what_belongs_to_its_readers(
    database_url: str, bob: str, statement: str, row_security: str
) -> None:
    with psycopg.connect(bob, autocommit=True) as connection:
        connection.execute(PIN_SESSION)
        connection.execute(f"SET row_security = {row_security}")
        for others in (
            *(["audit"], ["main"], ["unknown"], ["billing", "audit"]),
            ["audit", "billing"],
        ):
            with pytest.raises(REFUSED, match="role bob may not run it; as a member"):
                connection.execute(statement, [others])
        assert execute(database_url, STORED) == []
        connection.execute(statement, [["billing"]])
    assert execute(database_url, STORED) == [("billing",)]


def test_a_role_stores_nothing_for_others_by_other_means(
    database_url: str, bob: str
) -> None:
    entry = "2026-01-01\t2026-01-01\t1\t{}\t0\trefused\taudit\n"
    columns = "created_at, due_at, seq, id, lane, cause, reader"
    execute(
        database_url, "SELECT outbox.make_partition('outbox.deferral', '2026-01-01')"
    )
    ((partition, *_), *_) = execute(
        database_url, "SELECT partition::text FROM outbox.partitions('outbox.deferral')"
    )
    with psycopg.connect(bob, autocommit=True) as connection:
        for statement in DISABLED:
            with pytest.raises(psycopg.Error) as error:
                connection.execute(statement)
            assert error.value.sqlstate == "42501", statement
        for table in ("outbox.deferral", partition):
            with (
                pytest.raises(REFUSED),
                connection.cursor() as cursor,
                cursor.copy(f"COPY {table} ({columns}) FROM STDIN") as copy,
            ):
                copy.write(entry.format("019a06dc-1084-7484-ac3a-41020050e14c"))
    assert execute(database_url, STORED) == []


def test_the_owner_and_members_of_relay_and_operator_store_for_all_readers(
    database_url: str, bob: str
) -> None:
    for n, role in enumerate(("owner", "relay", "operator")):
        with psycopg.connect(as_role(database_url, f"pillarbox_{role}")) as connection:
            readers = ["main", "billing", "audit"]
            connection.execute(
                POSITION.replace("now(), 1,", f"now(), {n + 1},"), [readers]
            )
            connection.execute(ENTRY, [readers])
            connection.execute(DEAD_LETTER, [readers])
    assert len(execute(database_url, STORED)) == 27


def test_a_members_member_and_a_renamed_role_are_told_apart(
    database_url: str, bob: str
) -> None:
    with (
        new_role(database_url, "carol", "LOGIN IN ROLE bob"),
        psycopg.connect(login(database_url, "carol")) as connection,
    ):
        connection.execute(ENTRY, [["billing"]])
        connection.commit()
    execute(database_url, "ALTER ROLE bob RENAME TO dave")
    try:
        with (
            psycopg.connect(login(database_url, "dave")) as connection,
            pytest.raises(REFUSED, match="reader=billing: role dave may not"),
        ):
            connection.execute(ENTRY, [["billing"]])
    finally:
        execute(database_url, "ALTER ROLE dave RENAME TO bob")


def test_a_role_adds_readers_of_its_own_that_get_messages(
    database_url: str, bob: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def add_by_bob(name: str, *options: str) -> tuple[int, str]:
        code = main(["readers", "add", name, *options, "--database", bob])
        return code, capsys.readouterr().err

    assert add_by_bob("hooks", "--broker", BROKER, "--role", "alice")[0] == 0
    for name, options, said in (
        ("audit", ["--topic", "t"], "role bob may not run it"),
        ("main", ["--topic", "t"], "role bob may not run it"),
        ("nothing", ["--discard"], "only members of pillarbox_relay discard"),
    ):
        code, told = add_by_bob(name, *options)
        assert (code, said in told) == (2, True), told
    with administration(database_url, application_name="test") as connection:
        roles = {it.reader: it.role for it in list_readers(connection)}
    assert roles == {"main": None, "billing": "bob", "audit": "alice", "hooks": "bob"}


@pytest.mark.parametrize("statement", [POSITION, ENTRY, DEAD_LETTER])
def test_the_server_calls_no_function_for_relays_and_one_a_statement_for_others(
    database_url: str, bob: str, statement: str
) -> None:
    def calls(url: str) -> list[str]:
        with psycopg.connect(url) as connection:
            plan = connection.execute(
                f"EXPLAIN (ANALYZE, TIMING OFF) {statement}", [["billing"] * 9]
            ).fetchall()
            connection.rollback()
        return [line for (line,) in plan if "_of_reader" in line]

    assert calls(as_role(database_url, "pillarbox_relay")) == []
    (call,) = calls(bob)
    assert call.endswith("calls=1")


async def test_a_relay_runs_a_reader_of_its_role_and_is_refused_others(
    database_url: str, bob: str
) -> None:
    publisher = ScriptedPublisher(lambda _: Nacked("no", permanent=True))
    with pytest.raises(
        ConfigError, match="reader=audit: role bob may not run it"
    ) as no:
        async with running(bob, publisher, reader="audit", broker=BROKER):
            pass
    with pytest.raises(ConfigError, match="reader=main: role bob may not run it"):
        async with running(bob, publisher):
            pass
    assert publisher.calls == []
    async with running(bob, publisher, reader="billing", broker=BROKER) as relay:
        insert(database_url, Message("t", b""))
        await relay.events.wait_for(MessageDeadLettered)
    origins = "SELECT origin FROM outbox.dead_letter"
    assert execute(database_url, origins) == [("relay:billing",)]

    _, told, remedy = str(no.value).partition("pillarbox_operator, run ")
    assert told
    execute(as_role(database_url, "pillarbox_operator"), remedy)
    accepting = ScriptedPublisher()
    async with running(bob, accepting, reader="audit", broker=BROKER):
        await accepting.until_acked(1)


async def test_a_relay_whose_role_loses_its_reader_holds_no_lanes_and_says_so(
    database_url: str, bob: str
) -> None:
    publisher = ScriptedPublisher()
    async with running(bob, publisher, reader="billing", broker=BROKER) as relay:
        await wait_until_held(relay, LANES)
        execute(database_url, "UPDATE outbox.reader SET role = NULL")
        await relay.events.wait_for(LeaseLost)
        (lost,) = await relay.events.wait_for(DatabaseLost)
        insert(database_url, Message("t", b""))
        await relay.events.wait_for(DatabaseLost, 2)
        assert "role bob may not run it" in lost.reason
        assert publisher.calls == []
        execute(
            database_url,
            "UPDATE outbox.reader SET role = 'bob' WHERE reader = 'billing'",
        )
        await publisher.until_acked(1)


def test_a_plan_that_the_server_keeps_checks_the_role_each_time(
    database_url: str, bob: str
) -> None:
    values: dict[str, Any] = {
        "reader": "billing",
        "starts": ["2026-01-01"],
        "ends": ["2026-01-02"],
        "lanes": [0],
        "up_tos": [1],
        "snapshots": ["1:1:"],
        "late_up_tos": [None],
        "late_snapshots": [None],
        "messages": [0],
        "deferred": [0],
        "next_xids": ["1"],
    }
    execute(
        database_url, "SELECT outbox.make_partition('outbox.position', '2026-01-01')"
    )
    store = load("outbox.log", "store_positions")
    with psycopg.connect(bob, autocommit=True) as connection:
        for number in range(1, 12):
            connection.execute(store, {**values, "numbers": [number]}, prepare=True)
        with pytest.raises(REFUSED):
            connection.execute(
                store, {**values, "numbers": [12], "reader": "audit"}, prepare=True
            )
        execute(database_url, "UPDATE outbox.reader SET role = NULL")
        with pytest.raises(REFUSED):
            connection.execute(store, {**values, "numbers": [12]}, prepare=True)


def test_only_an_operator_drops_readers(
    database_url: str, bob: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def drop(url: str) -> int:
        return main(["readers", "drop", "billing", "--discard", "--database", url])

    insert(database_url, Message("t", b""))
    for url in (
        *(
            as_role(database_url, f"pillarbox_{it}")
            for it in ("relay", "web", "consumer")
        ),
        bob,
    ):
        assert drop(url) == 2
        assert "connect as a member of pillarbox_operator" in capsys.readouterr().err
    with administration(database_url, application_name="test") as connection:
        assert [it.dropped_at for it in list_readers(connection)] == [None] * 3
    assert drop(as_role(database_url, "pillarbox_operator")) == 0
    assert "billing was dropped with a backlog of 1 message" in capsys.readouterr().out


def test_a_reader_is_added_for_a_role_that_exists(
    database_url: str, bob: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def add_for(name: str, role: str) -> int:
        there = ["--database", as_role(database_url, "pillarbox_relay")]
        return main(
            ["readers", "add", name, "--broker", BROKER, "--role", role, *there]
        )

    assert add_for("typo", "bobby") == 2
    assert 'role "bobby" does not exist' in capsys.readouterr().err
    with new_role(database_url, '"Bob\'s"'):
        assert add_for("odd", "Bob's") == 0
    assert add_for("more", "bob") == 0
    capsys.readouterr()
    assert main(["readers", "list", "--database", database_url]) == 0
    assert "odd" in (listed := capsys.readouterr().out)
    assert "bobby" not in listed
    with administration(database_url, application_name="test") as connection:
        roles = {it.reader: it.role for it in list_readers(connection)}
    assert roles == {
        "main": None,
        "billing": "bob",
        "audit": "alice",
        "odd": "Bob's",
        "more": "bob",
    }


def test_the_doctor_finds_a_role_that_is_gone_or_lacks_privileges(
    database_url: str, bob: str, doctor: Doctor
) -> None:
    def found() -> dict[str, str]:
        monitor = as_role(database_url, "pillarbox_monitor")
        _, findings = doctor(monitor)
        return {
            it["finding"]: it["remedy"] for it in findings if "role of" in it["finding"]
        }

    assert found() == {}
    execute(database_url, "REVOKE pillarbox_reader FROM bob")
    execute(
        database_url, "UPDATE outbox.reader SET role = 'eve' WHERE reader = 'audit'"
    )
    findings = found()
    assert set(findings) == {
        "the role of reader audit, eve, doesn't exist",
        "the role of reader billing, bob, lacks the privileges of pillarbox_reader",
    }
    for remedy in findings.values():
        execute(database_url, remedy)
    assert found() == {}


async def test_an_operator_replays_for_all_readers_and_a_role_for_its_own(
    database_url: str, bob: str
) -> None:
    publisher = ScriptedPublisher()
    insert(database_url, Message("t", b""))
    positions.publish(database_url)

    def replay(url: str, reader: str) -> int:
        options = ["--reader", reader, "--since", "1h", "--database", url]
        return main(["replay", *options])

    async with running(bob, publisher, reader="billing", broker=BROKER):
        await publisher.until_acked(1)
    operator = as_role(database_url, "pillarbox_operator")
    assert replay(bob, "billing") == 0
    assert [replay(url, "main") for url in (bob, operator)] == [2, 0]
    replays = "SELECT reader FROM outbox.deferral WHERE cause = 'replayed'"
    assert sorted(execute(database_url, replays)) == [("billing",), ("main",)]
    async with running(bob, publisher, reader="billing", broker=BROKER):
        await publisher.until_acked(2)
