"""`pillarbox pause` and `pillarbox resume`, and what shows a pause."""

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from pillarbox.outbox.cli.main import main
from pillarbox.outbox.postgres.advisory_lock import Lock, reader_class
from tests.acceptance.relays import as_role
from tests.fixtures.hostile_rows import insert_rows
from tests.fixtures.presence import record_process
from tests.fixtures.readers import add_consumer
from tests.fixtures.sessions import execute

RECORD = (
    "SELECT kind, selection, reason, asked_by, state, stopped_by"
    " FROM outbox.operation ORDER BY asked_at, kind"
)
PAUSED = "SELECT outbox.paused_topics('billing')"


def change(url: str, *arguments: str, role: str = "pillarbox_operator") -> int:
    return main([*arguments, "--database", as_role(url, role)])


def status(url: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    url = as_role(url, "pillarbox_monitor")
    main(["status", "--json", "--database", url])
    (found,) = json.loads(capsys.readouterr().out)["databases"]
    assert isinstance(found, dict)
    return found


def test_a_pause_and_its_end_are_recorded_with_who_and_why(database_url: str) -> None:
    of_billing = ["--consumer", "billing"]
    assert change(database_url, "pause", *of_billing, "--reason", "bank") == 0
    assert execute(database_url, PAUSED) == [(["*"],)]
    assert change(database_url, "resume", *of_billing, "--reason", "is back") == 0
    assert execute(database_url, PAUSED) == [([],)]
    ((login,),) = execute(database_url, "SELECT session_user::text")
    selection = {"consumer": "billing"}
    assert execute(database_url, RECORD) == [
        ("pause", selection, "bank", login, "stopped", login),
        ("resume", selection, "is back", login, "done", None),
    ]


@pytest.mark.parametrize(
    ("options", "topics"),
    [
        (["--topic", "a.*"], ["a.*"]),
        (["--topic", "a", "--consumer", "billing"], ["a"]),
        (["--topic", "a", "--consumer", "mail"], []),
    ],
)
def test_a_pause_concerns_a_consumer_a_topic_or_both(
    database_url: str, options: list[str], topics: list[str]
) -> None:
    assert change(database_url, "pause", *options, "--reason", "why") == 0
    assert execute(database_url, PAUSED) == [(topics,)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pause", "--reason", "r"], "name a consumer, a topic, or both"),
        (["pause", "--consumer", "b"], "the reason is empty"),
        (["pause", "--topic", "a*b", "--reason", "r"], "a prefix followed by one *"),
        (["pause", "--consumer=", "--topic=a", "--reason=r"], "consumer '': is empty"),
        (["pause", "--consumer=b--slow", "--reason=r"], "pause the consumer b"),
        (["resume", "--consumer", "b"], "consumer b is not paused"),
        (["pause", "--topic", "t", "--reason", "r"], "is paused already"),
    ],
)
def test_a_change_that_makes_no_sense_is_refused(
    database_url: str,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    assert change(database_url, "pause", "--topic", "t", "--reason", "first") == 0
    capsys.readouterr()
    assert change(database_url, *arguments) == 2
    assert said in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize("running", ["billing"], indirect=True)
def test_a_consumer_with_a_paused_topic_can_be_late_with_another(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert change(database_url, "pause", "--topic=ord*", "--reason=bank") == 0

    def late() -> list[str]:
        found = status(database_url, capsys)["findings"]
        return [it["finding"] for it in found if "is late" in it["finding"]]

    at = "now() - interval '{} minutes'".format
    insert_rows(database_url, [(1, {"topic": "'orders'", "created_at": at(90)})])
    assert late() == []
    insert_rows(database_url, [(2, {"topic": "'invoices'", "created_at": at(20)})])
    assert late() == ["the consumer billing is late: its lag is 20m"]
    assert change(database_url, "pause", "--consumer=billing", "--reason=bank") == 0
    assert late() == []


def test_status_warns_of_the_pause_of_a_consumer_that_nobody_knows(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record_process(database_url, "consumer", "billing")
    for name in ("mail", "mail--slow"):
        add_consumer(database_url, name, "orders")
    for name in ("billing", "biling"):
        assert change(database_url, "pause", f"--consumer={name}", "--reason=bank") == 0
    found = {
        it["severity"]: it["finding"]
        for it in status(database_url, capsys)["findings"]
        if "is paused by" in it["finding"]
    }
    assert found["hint"].startswith("consumer billing is paused by")
    assert found["warning"].startswith("consumer biling is paused by")
    assert found["warning"].endswith("these do: billing, mail")


def test_only_who_may_pause_can(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["pause", "--topic", "t", "--reason", "r"]
    assert change(database_url, *arguments, role="pillarbox_monitor") == 2
    assert "pillarbox_operator" in capsys.readouterr().err
    assert change(database_url, *arguments, role="pillarbox_web") == 0


@pytest.fixture
def running(database_url: str, request: pytest.FixtureRequest) -> Iterator[None]:
    """A consumer billing that runs and reads the outbox, for a queue if it is named."""
    add_consumer(database_url, request.param, "orders", "invoices")
    record_process(database_url, "consumer", "billing")
    with psycopg.connect(database_url) as connection:
        lock = [reader_class(request.param), int(Lock.MEMBER)]
        connection.execute("SELECT pg_advisory_lock_shared(%s, %s)", lock)
        yield


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize("running", ["billing", "billing--slow"], indirect=True)
def test_status_shows_the_pause_instead_of_a_late_consumer(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"topic": "'orders'", "created_at": "now() - interval '24 hours'"}
    insert_rows(database_url, [(1, row)])

    def findings() -> list[str]:
        found = status(database_url, capsys)["findings"]
        return [it["finding"] for it in found if "billing" in it["finding"]]

    (late,) = findings()
    assert "is late" in late
    assert change(database_url, "pause", "--consumer=billing", "--reason=bank") == 0
    (paused,) = findings()
    assert "consumer billing is paused by" in paused
    assert "bank" in paused
    found = status(database_url, capsys)
    assert [it["consumer"] for it in found["pauses"]] == ["billing"]
    execute(
        database_url,
        "UPDATE outbox.partition_policy SET retention = '30 hours'"
        " WHERE parent_table = 'outbox.message'",
    )
    (held,) = findings()
    assert "its partition will be held" in held
    main(["status", "--database", database_url])
    assert "pillarbox resume --consumer billing" in capsys.readouterr().out
