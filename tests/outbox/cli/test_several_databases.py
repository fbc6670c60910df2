"""What reads takes several databases: those of an outbox and of its consumers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from pillarbox import Message
from pillarbox.outbox.cli.command import database_urls, opened_all
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.errors import ConfigError, DatabaseUnavailableError
from tests.acceptance.relays import as_role
from tests.fixtures.dead_letters import give_up, states
from tests.fixtures.family import handle
from tests.fixtures.positions import publish
from tests.fixtures.presence import record_process
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute

VARIABLE: Final = "PILLARBOX_DATABASE_URL"
READS: Final = {
    "status": ["status"],
    "blocked": ["blocked"],
    "dead-letters list": ["dead-letters", "list"],
    "dead-letters export": ["dead-letters", "export"],
    "trace": ["trace", "--key", "k"],
}

Run = Callable[..., str]


def name_of(url: str) -> str:
    return url.rpartition("/")[2]


@pytest.fixture
def run(
    database_url: str,
    other_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """Run a command with both databases in the variable."""
    urls = (as_role(it, "pillarbox_monitor") for it in (database_url, other_url))
    monkeypatch.setenv(VARIABLE, " ".join(urls))

    def run(*argv: str, status: int = 0) -> str:
        capsys.readouterr()
        assert main(list(argv)) == status
        printed = capsys.readouterr()
        return printed.err if status == 2 else printed.out

    return run


def as_json(run: Run, *argv: str, status: int = 0) -> Any:
    return json.loads(run(*argv, "--json", status=status))


def test_status_is_that_of_the_worst_and_shows_each(
    database_url: str, other_url: str, run: Run
) -> None:
    for url in (database_url, other_url):
        execute(url, "CALL outbox.maintain()")
    give_up(other_url, Message("orders", b""), schema="inbox")

    said = as_json(run, "status", status=1)

    first, second = said["databases"]
    assert [it["database"] for it in (first, second)] == [
        name_of(database_url),
        name_of(other_url),
    ]
    assert said["status"] == 1
    assert {it["check"] for it in first["findings"]} == {"backlog"}
    assert "failures" in {it["check"] for it in second["findings"]}
    lines = run("status", status=1).splitlines()
    assert lines[0].startswith(f"all well: {name_of(database_url)} at ")
    assert any(it.startswith(f"1 warning: {name_of(other_url)} at ") for it in lines)


def test_blocked_keys_are_listed_for_each(
    database_url: str, other_url: str, run: Run
) -> None:
    record_process(other_url, "consumer", "billing", blocked_keys=2)

    first, second = run("blocked").splitlines()[:2]

    name = name_of(database_url)
    assert first == f"{name}: no blocked keys and no refused messages"
    assert second.startswith(f"{name_of(other_url)}: 2 blocked keys")
    assert [it["keys"] for it in as_json(run, "blocked")] == [0, 2]


def test_dead_letters_are_listed_shown_and_exported_together_the_newest_first(
    database_url: str, other_url: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"{database_url} {other_url}")
    (here,) = give_up(database_url, Message("sent", b""))
    (there,) = give_up(other_url, Message("received", b""), schema="inbox")

    listed = as_json(run, "dead-letters", "list")

    assert [(it["database"], it["side"], it["topic"]) for it in listed] == [
        (name_of(other_url), "inbox", "received"),
        (name_of(database_url), "outbox", "sent"),
    ]
    _, row, _ = run("dead-letters", "list").splitlines()
    assert f"{name_of(other_url)} inbox" in row
    exported = run("dead-letters", "export").splitlines()
    assert [json.loads(it)["topic"] for it in exported] == ["sent", "received"]
    for id, url in ((here, database_url), (there, other_url)):
        shown = as_json(run, "dead-letters", "show", str(id))
        assert shown["database"] == name_of(url)


def test_a_dead_letter_is_discarded_where_it_is(
    database_url: str, other_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_up(database_url, Message("sent", b""))
    (there,) = give_up(other_url, Message("received", b""))
    monkeypatch.setenv(VARIABLE, f"{database_url} {other_url}")

    assert main(["dead-letters", "discard", str(there), "--reason=old"]) == 0

    assert [status for status, *_ in states(database_url)] == ["PENDING"]
    assert [status for status, *_ in states(other_url)] == ["DISCARDED"]


def test_a_trace_goes_from_one_service_through_the_other(
    database_url: str, other_url: str, run: Run
) -> None:
    placed = Message("orders.placed", b"")
    issued = Message("invoices.issued", b"", headers={"causation-id": str(placed.id)})
    insert(database_url, placed)
    publish(database_url)
    handle(other_url, placed, "invoicing")
    insert(other_url, issued)
    publish(other_url)
    handle(database_url, issued, "orders")

    found = as_json(run, "trace", str(issued.id))

    assert [it["id"] for it in found["causes"]] == [str(placed.id)]
    assert found["unknown"] == []
    assert {(it["what"], it["database"]) for it in found["life"]["steps"]} == {
        ("added", name_of(other_url)),
        ("published", name_of(other_url)),
        ("handled", name_of(database_url)),
    }


def test_what_another_database_knows_is_named_with_the_option_to_add_it(
    database_url: str, other_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    placed = Message("orders.placed", b"")
    issued = Message("invoices.issued", b"", headers={"causation-id": str(placed.id)})
    insert(database_url, placed)
    publish(database_url)
    handle(other_url, placed, "invoicing")
    insert(other_url, issued)
    here, there = name_of(database_url), name_of(other_url)
    add = "add its database: --database URL"
    for url, id, missing in (
        (
            database_url,
            placed.id,
            f"not in {here}: what consumers did with it, if anything; {add}",
        ),
        (other_url, placed.id, f"not in {there}: its outbox; {add}"),
        (
            other_url,
            issued.id,
            f"not in {there}: the outbox of {placed.id}, which led to it; {add}",
        ),
    ):
        assert main(["trace", str(id), "--database", url]) == 0
        assert f"\n- {missing}\n" in capsys.readouterr().out


def test_databases_of_one_name_have_their_address(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    again = database_url.replace("127.0.0.1", "localhost")
    urls = [database_url, again, again]
    assert main(["blocked", *(f"--database={it}" for it in urls)]) == 0
    names = [it.partition(": ")[0] for it in capsys.readouterr().out.splitlines()]
    assert names == [url.rpartition("@")[2] for url in (database_url, again)]


@pytest.mark.parametrize("command", READS)
def test_an_error_names_the_database_in_which_it_happened(
    database_url: str, other_url: str, run: Run, command: str
) -> None:
    argv = READS[command]
    execute(database_url, "REVOKE USAGE ON SCHEMA outbox FROM pillarbox_monitor")
    if command != "status":  # it reports what it can't read as a finding
        denied = run(*argv, status=2)
        assert f"/{name_of(database_url)}: permission denied" in denied
        assert name_of(other_url) not in denied
    execute(other_url, "DROP SCHEMA outbox CASCADE")
    execute(database_url, "GRANT USAGE ON SCHEMA outbox TO pillarbox_monitor")
    missing = run(*argv, status=2)
    assert name_of(other_url) in missing
    assert name_of(database_url) not in missing


def test_a_lost_connection_is_that_of_the_database_that_ended_it(
    database_url: str, other_url: str
) -> None:
    def lose_the_first() -> None:
        with opened_all([database_url, other_url], "trace") as databases:
            lost = databases[name_of(database_url)]
            end = "SELECT pg_terminate_backend(%s, 10000)"
            execute(other_url, end, [lost.info.backend_pid])
            lost.execute("SELECT 1")

    with pytest.raises(DatabaseUnavailableError, match=name_of(database_url)):
        lose_the_first()


AWAY: Final = "postgresql://nobody@127.0.0.1:9/invoicing"


def test_status_shows_the_others_while_one_is_unreachable(
    database_url: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(database_url, "CALL outbox.maintain()")
    monkeypatch.setenv(VARIABLE, f"{AWAY} {database_url}")
    first, remedy, _, answer, *_ = run("status", status=4).splitlines()
    assert first.startswith(f"unknown  database: can't reach the database {AWAY}: ")
    assert "check that the database is running" in remedy
    assert answer.startswith(f"all well: {name_of(database_url)} at ")
    said = as_json(run, "status", status=4)
    assert [it["database"] for it in said["databases"]] == [name_of(database_url)]
    assert [it["severity"] for it in said["missing"]] == ["unknown"]
    monkeypatch.setenv(VARIABLE, f"{AWAY} {AWAY}")
    assert AWAY in run("status", status=2)


def test_a_trace_says_which_database_it_could_not_search(
    database_url: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = Message("orders.placed", b"", key="k")
    insert(database_url, placed)
    monkeypatch.setenv(VARIABLE, f"{database_url} {AWAY}")
    for what, status in (
        ([str(placed.id)], 0),
        (["--key", "k"], 0),
        ([str(Message("orders.placed", b"").id)], 4),
        (["--key", "other"], 4),
    ):
        assert AWAY in run("trace", *what, status=status)


@pytest.mark.parametrize("command", ["blocked", "dead-letters list"])
def test_a_list_that_would_be_incomplete_is_refused(
    database_url: str, run: Run, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv(VARIABLE, f"{database_url} {AWAY}")
    assert AWAY in run(*command.split(), status=2)


def test_files_name_several_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv(f"{VARIABLE}_FILE", raising=False)
    with pytest.raises(ConfigError, match="no database given"):
        database_urls(None)
    files = [tmp_path / name for name in ("orders", "invoicing")]
    for file in files:
        file.write_text(f"postgresql://db/{file.name}\n")
    monkeypatch.setenv(f"{VARIABLE}_FILE", " ".join(map(str, files)))
    assert database_urls(None) == [
        "postgresql://db/orders",
        "postgresql://db/invoicing",
    ]
    assert database_urls(["postgresql://given"]) == ["postgresql://given"]


@pytest.mark.parametrize(
    "command", ["doctor", "relay --broker memory:", "dead-letters retry --topic=*"]
)
def test_a_command_that_acts_takes_one(run: Run, command: str) -> None:
    said = run(*command.split(), status=2)
    assert f"{VARIABLE} names several databases, and this command takes one" in said
    assert "use --database URL" in said
