"""`pillarbox replay` publishes messages again, with the same ids."""

import asyncio
import time
from datetime import UTC, datetime, timedelta
from functools import partial

import psycopg
import pytest

from pillarbox import Message
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.postgres.connection import conninfo
from pillarbox.relay.publisher import Acked, Nacked
from pillarbox.relay.replay import ReplayCriteria, replay_published
from tests.acceptance.relays import as_role
from tests.fixtures.positions import defer, give_up, publish
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import insert, numbered, running, unsettled
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for

pytestmark = pytest.mark.timeout(180)

READY = "SELECT topic FROM outbox.message_status WHERE state = 'ready' ORDER BY seq"


@pytest.fixture
def url(database_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the database's URL; commands connect with the privileges of a relay."""
    monkeypatch.setenv(
        "PILLARBOX_DATABASE_URL", as_role(database_url, "pillarbox_relay")
    )
    return database_url


def published(url: str, *messages: Message) -> None:
    insert(url, *messages)
    publish(url)


def ready(url: str) -> list[str]:
    return [topic for (topic,) in execute(url, READY)]


def last_hour(**changes: object) -> ReplayCriteria:
    now = datetime.now(UTC)
    return ReplayCriteria(since=now - timedelta(hours=1), until=now, **changes)  # type: ignore[arg-type]


SELECTIONS = {
    "": ["a", "b.c", "b.d", "e"],
    "--topic a": ["a"],
    "--topic b.*": ["b.c", "b.d"],
    "--key k": ["a", "b.d"],
    "--tenant acme": ["e"],
    "--limit 2": ["a", "b.c"],
    "--key k --topic b.*": ["b.d"],
    "--until 1m": [],
}


def test_matching_messages_become_ready_again(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    insert(
        url,
        Message("a", b"", key="k"),
        Message("b.c", b""),
        Message("b.d", b"", key="k"),
        Message("e", b"", tenant="acme"),
    )
    for options, expected in SELECTIONS.items():
        publish(url)

        assert main(["replay", "--since", "1h", *options.split()]) == 0

        said = capsys.readouterr().out
        assert said.startswith(f"{len(expected)} replayed"), options
        assert ready(url) == expected, options


def test_a_dry_run_counts_by_topic_and_changes_nothing(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    since = datetime.now(UTC) - timedelta(minutes=1)
    published(url, Message("b", b""), Message("a", b""), Message("b", b""))
    replay = ["replay", "--since", since.isoformat(), "--dry-run"]

    assert main(replay) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[:2] for row in rows] == [["a", "1"], ["b", "2"]]
    assert main([*replay, "--topic", "other"]) == 0
    assert capsys.readouterr().out == "no published message matches\n"
    assert main([*replay, "--limit", "2"]) == 0
    assert capsys.readouterr().out.endswith("with --limit 2, the first 2 of these\n")
    assert ready(url) == []


def test_only_published_messages_are_replayed_and_start_with_no_attempts(
    url: str,
) -> None:
    insert(url, Message("published", b"", key="k"))
    defer(url, "refused", attempts=7)
    publish(url)
    insert(url, Message("waits", b""), Message("given up", b""))
    give_up(url, "topic = 'given up'")

    assert main(["replay", "--since", "1h"]) == 0

    status = "SELECT topic, state, run, attempts, last_error FROM outbox.message_status"
    assert sorted(execute(url, status)) == [
        ("given up", "dead_lettered", 0, 0, None),
        ("published", "ready", 1, 0, None),
        ("waits", "ready", 0, 0, None),
    ]


def test_a_replay_keeps_the_history(url: str) -> None:
    published(url, Message("orders", b"", key="k"))
    first = "SELECT published_at FROM outbox.message_status"
    before = execute(url, first)

    for _ in range(2):
        assert main(["replay", "--since", "1h"]) == 0
        publish(url)

    assert execute(url, first) == before
    assert execute(url, "SELECT run FROM outbox.message_status") == [(2,)]
    requests = (
        "SELECT requested_by = session_user FROM outbox.deferral"
        " WHERE cause = 'replayed'"
    )
    assert execute(url, requests) == [(True,)] * 2


def test_a_message_already_waiting_for_its_replay_is_not_replayed_twice(
    url: str,
) -> None:
    """A replay that was interrupted is completed by the same command."""
    published(url, *numbered("a", 4))
    assert main(["replay", "--since", "1h", "--limit", "2"]) == 0

    assert main(["replay", "--since", "1h"]) == 0

    assert execute(url, "SELECT seq, run FROM outbox.deferral ORDER BY entry") == [
        (seq, 1) for (seq,) in execute(url, "SELECT seq FROM outbox.message ORDER BY 1")
    ]


async def test_a_replayed_message_that_is_refused_is_retried(url: str) -> None:
    message = Message("orders", b"", key="k")
    insert(url, message)
    publish(url)
    publisher = ScriptedPublisher(
        lambda _: Nacked("not now") if len(publisher.calls) == 1 else Acked()
    )
    async with running(url, publisher):
        assert await asyncio.to_thread(main, ["replay", "--since", "1h"]) == 0
        await publisher.until_acked(1)
        await asyncio.to_thread(
            wait_for, "it is settled", partial(lambda: unsettled(url) == 0), seconds=90
        )

    assert [m.id for m in publisher.acked] == [message.id]
    status = "SELECT state, run, attempts, last_error FROM outbox.message_status"
    assert execute(url, status) == [("published", 1, 1, "not now")]


async def test_a_running_relay_publishes_replayed_messages_with_each_key_in_order(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = numbered("abc", 20)
    publisher = ScriptedPublisher()
    async with running(url, publisher):
        await asyncio.to_thread(insert, url, *messages)

        async def all_settled(what: str) -> None:
            done = partial(lambda: unsettled(url) == 0)
            await asyncio.to_thread(wait_for, what, done, seconds=90)

        await all_settled("all are published")
        monkeypatch.setattr("pillarbox.relay.cli._BATCH", 3)
        replay = ["replay", "--since", "1h", "--key", "b"]
        assert await asyncio.to_thread(main, replay) == 0
        await all_settled("they are published again")

    topics = [message.topic for message in publisher.acked]
    assert [topic for topic in topics if topic[0] == "b"] == 2 * [
        f"b/{n}" for n in range(20)
    ]
    assert len(topics) == 80


def test_each_batch_is_committed_and_reported_and_waits_for_its_turn(url: str) -> None:
    published(url, *numbered("a", 5))
    told: list[tuple[int, list[str]]] = []
    waits: list[float] = []
    with psycopg.connect(conninfo(url), autocommit=True) as connection:
        replayed = replay_published(
            connection,
            last_hour(),
            batch_size=2,
            max_per_second=0.001,
            on_batch=lambda count: told.append((count, ready(url))),
            sleep=waits.append,
        )

    assert replayed == 5
    assert told == [(count, [f"a/{n}" for n in range(count)]) for count in (2, 4, 5)]
    assert waits == pytest.approx([2000, 4000, 5000], abs=60)


def test_a_replay_keeps_the_rate_that_is_asked_for(url: str) -> None:
    published(url, *numbered("a", 3))
    began = time.monotonic()
    assert main(["replay", "--since", "1h", "--rate", "6/s"]) == 0
    assert time.monotonic() - began >= 0.5


def test_a_read_only_role_can_count_and_is_told_which_grant_it_needs(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    published(url, Message("orders", b""))
    replay = ["replay", "--since", "1h"]
    monitor = ["--database", as_role(url, "pillarbox_monitor")]

    assert main([*replay, "--dry-run", *monitor]) == 0
    assert main([*replay, *monitor]) == 2

    said = capsys.readouterr().err.splitlines()[-1]
    assert "permission denied" in said
    assert "GRANT pillarbox_relay TO its role" in said
    assert ready(url) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--since", "yesterday"], "'--since': 'yesterday': write a moment"),
        (["--since", "2026-01-31T14:00"], "with its time zone"),
        (["--since", "999999w"], "'--since': '999999w'"),
        (["--since", "1h", "--until", "2h"], "must be before until"),
        (["--since", "1h", "--until", "soon"], "'--until': 'soon'"),
        (["--since", "1h", "--rate", "fast"], "'--rate': 'fast': write 10/s"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_error_for_invalid_input_is_one_line(
    capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    nowhere = "--database=postgresql://127.0.0.1:1/nowhere"
    assert main(["replay", nowhere, *options]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
