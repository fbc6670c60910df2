"""`pillarbox status`: whether all is well, and what is waiting or failing."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from pillarbox import Message
from pillarbox.outbox.cli.main import main
from tests.acceptance.relays import as_role
from tests.fixtures.positions import publish
from tests.fixtures.presence import record_process
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute

ADDED_EARLIER = """
    INSERT INTO outbox.message (id, created_at, lane, topic, content_type, payload)
    SELECT outbox.uuid7(), now() - interval '2 minutes', 16, 'orders', 'text/plain', ''
"""


def status(url: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    code = main(["status", "--json", "--database", url])
    return code, json.loads(capsys.readouterr().out)


def test_nothing_is_wrong_with_a_new_database(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    execute(database_url, "CALL outbox.maintain()")
    assert main(["status", "--database", database_url]) == 0
    answer, hint, remedy, *_ = capsys.readouterr().out.splitlines()
    assert answer.startswith("all well: ")
    assert hint.startswith("hint     backlog: no relay is running")
    assert remedy.strip().startswith("pillarbox relay")


def test_the_answer_names_each_problem_and_its_remedy(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    execute(database_url, "CALL outbox.maintain()")
    execute(database_url, ADDED_EARLIER)

    assert main(["status", "--database", database_url]) == 3

    answer, finding, remedy, *more = capsys.readouterr().out.splitlines()
    assert answer.startswith("1 error: ")
    assert re.match("error +backlog: no relay is running, .* for 2m$", finding)
    assert remedy.strip().startswith("pillarbox relay")
    assert more[more.index("") + 1] == "outbox     1 waits: 1 ready; the oldest for 2m"


def test_it_says_which_replica_receives_and_which_stands_by(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for host, topics in (("a 1", None), ("b 2", "orders, refunds")):
        values = {"host": host, "standing_by": topics}
        record_process(database_url, "consumer", "billing", **values)
    main(["status", "--database", database_url])
    shown = capsys.readouterr().out
    assert re.search(r"billing on a 1, running for \S+, from redis://broker/0\n", shown)
    assert re.search(r"on b 2, .*0, stands by for orders, refunds\n", shown)


def test_a_part_that_could_not_be_measured_is_named(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    execute(database_url, "REVOKE SELECT ON outbox.upkeep FROM pillarbox_monitor")

    code, said = status(as_role(database_url, "pillarbox_monitor"), capsys)

    assert code == 4
    (shown,) = said["databases"]
    (missing,) = shown["missing"]
    assert missing["check"] == "upkeep"
    assert "permission denied" in missing["finding"]
    assert shown["outbox"]["messages"] == 0


def test_the_rate_comes_from_the_latest_positions(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    insert(database_url, *(Message("orders", b"") for _ in range(60)))
    publish(database_url)
    execute(database_url, "CALL outbox.maintain()")

    assert main(["status", "--database", database_url]) == 0

    out = capsys.readouterr().out
    (line,) = [it for it in out.splitlines() if it.startswith("published")]
    assert re.fullmatch(
        r"published  0.2/s, p50 \S+, p95 \S+ in the last 5m",
        line,
    )
