"""`pillarbox trace`: the life of a message as text and as JSON."""

import json
import re

import pytest

from pillarbox import Message
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.acceptance.relays import as_role
from tests.fixtures.family import handle, insert_family
from tests.fixtures.positions import publish
from tests.fixtures.postgres import Template, new_database
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute

NASTY = 'email."]\x1b[31m\u202e'


@pytest.fixture
def family(database_url: str) -> list[Message]:
    return insert_family(database_url, b"secret", NASTY)


def run(url: str, *arguments: str) -> int:
    return main(["trace", *arguments, "--database", as_role(url, "pillarbox_monitor")])


def test_a_scheduled_message_counts_from_the_moment_it_was_due(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = Message("orders.placed", b"")
    insert(database_url, message)
    execute(
        database_url,
        "UPDATE outbox.message SET created_at = created_at - interval '1 minute',"
        " available_at = created_at - interval '1 second'",
    )
    publish(database_url)

    assert run(database_url, str(message.id)) == 0

    line = capsys.readouterr().out.splitlines()[1]
    assert re.fullmatch(r"published [12]\S* after it was due", line), line


def test_the_answer_comes_first_then_the_steps_then_the_tree(
    database_url: str, family: list[Message], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(database_url, str(family[0].id)) == 0

    said = capsys.readouterr().out
    lines = said.splitlines()
    assert lines[0] == f"orders.placed  {family[0].id}"
    assert lines[1].startswith("published after ")
    assert lines[2] == "billing: handled"
    assert "priority:       default" in lines
    head = next(number for number, line in enumerate(lines) if "at (UTC)" in line)
    assert [line.split()[3] for line in lines[head + 2 : head + 4]] == [
        "published",
        "handled",
    ]
    assert "◀ this one" in said
    assert f"├── payments.requested  {family[1].id}  waiting" in said
    assert f"└── {NASTY[:8]}\\x1b[31m\\u202e  {family[2].id}  published" in said
    assert "secret" not in said

    assert run(database_url, str(family[1].id)) == 0

    said = capsys.readouterr().out
    assert "waiting: refused 2 times" in said.splitlines()[1]
    assert 'email."]\\x1b[31m\\u202e' in said.splitlines()[1]
    *_, above, this = said.splitlines()
    assert above.startswith(f"orders.placed  {family[0].id}")
    assert this.startswith(f"└── payments.requested  {family[1].id}")


def test_json_contains_the_steps_and_the_tree(
    database_url: str, family: list[Message], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(database_url, str(family[0].id), "--json") == 0

    said = capsys.readouterr().out
    found = json.loads(said)
    assert found["found"] == "found"
    message = found["life"]
    assert [it["what"] for it in message["steps"]] == ["added", "published", "handled"]
    assert [it["id"] for it in message["caused"]] == [str(it.id) for it in family[1:]]
    assert message["caused"][0]["consumers"] == []
    assert "secret" not in said


def test_the_messages_of_a_key_are_listed_with_the_time_window(
    database_url: str, family: list[Message], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(database_url, "--key", "customer 7") == 0

    head, _, _, row, *_ = capsys.readouterr().out.splitlines()
    assert head.startswith("1 message of key 'customer 7' since 20")
    assert row.startswith(str(family[0].id))
    assert "billing: handled" in row
    assert run(database_url, "--key", "customer 7", "--json") == 0
    (message,) = json.loads(capsys.readouterr().out)["lives"]
    assert message["id"] == str(family[0].id)


def test_the_exit_status_distinguishes_not_found_from_not_knowable(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(database_url, str(Message("t", b"").id)) == 1
    assert "not found in any of the databases" in capsys.readouterr().out
    assert run(database_url, "01600000-0000-7000-8000-000000000000") == 4
    assert "outbox.message begins" in capsys.readouterr().out
    assert run(database_url, "--key", "k") == 1
    assert "--since 7d searches further back" in capsys.readouterr().out
    assert run(database_url, "--key", "k", "--since", "90d") == 4


def test_the_databases_of_consumers_are_searched_too(
    database_url: str,
    server: PostgresServer,
    template: Template,
    family: list[Message],
    capsys: pytest.CaptureFixture[str],
) -> None:
    effect = Message("effect", b"", headers={"causation-id": str(family[0].id)})
    with new_database(server, "pillarbox_consumer", template) as name:
        url = server.database_url(name)
        handle(url, family[0], "shipping")
        insert(url, effect)
        assert run(database_url, str(family[0].id), "--database", url) == 0
        said = capsys.readouterr().out
        assert run(database_url, str(family[0].id), "--database", url, "--json") == 0

    assert "shipping: handled" in said
    assert name in said
    life = json.loads(capsys.readouterr().out)["life"]
    steps = {(it["what"], it["consumer"]): it["database"] for it in life["steps"]}
    assert steps["handled", "shipping"] == name
    assert steps["published", None] == steps["handled", "billing"] != name
    assert str(effect.id) in {it["id"] for it in life["caused"]}


def test_invalid_combinations_of_arguments_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("postgresql://unused") == 2
    assert "give the id of a message, or --key KEY" in capsys.readouterr().err
    assert run("postgresql://unused", "1", "--key", "k") == 2
    assert "and not both" in capsys.readouterr().err
