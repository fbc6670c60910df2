"""A consumer that reads the outbox gives up, and is shown, as over a broker."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from itertools import count
from typing import Any
from uuid import UUID, uuid4

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from examples.sealed.aes_gcm import AesGcm
from pillarbox import AsyncJob, Consumer, Message, add
from pillarbox.inbox.errors import DeadLetter
from pillarbox.inbox.events import (
    CodecMissing,
    DeliveryReturned,
    DuplicateSkipped,
    HandlerFailed,
    MessageCancelled,
    MessageDeadLettered,
    MessageHandled,
)
from pillarbox.inbox.sources.postgres import PostgresSource, window_lane
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.lane import Priority, lane_of
from pillarbox.outbox.message_id import uuid7
from pillarbox.outbox.testing.events import RecordedEvents
from tests.acceptance.relays import as_role
from tests.fixtures.consumers import (
    NEVER,
    QUICK,
    async_sessions_of,
    consuming,
    running,
    sessions_of,
)
from tests.fixtures.dead_letters import retry, states
from tests.fixtures.readers import add_consumer
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for
from tests.fixtures.web import browsing

pytestmark = pytest.mark.timeout(180)

LETTERS = (
    "SELECT topic, message_id, attempts, error_reason, octet_length(payload)"
    " FROM inbox.dead_letter"
)
SESSIONS = (
    "SELECT application_name FROM pg_stat_activity WHERE datname = current_database()"
)
UNSETTLED = "SELECT count(*) FROM outbox.unsettled_message WHERE reader = 'billing'"
HOSTILE: dict[str, tuple[Mapping[str, str], str]] = {
    "an id that is no UUIDv7": ({"id": f"'{uuid4()}'"}, "sha256:"),
    "a reserved header": ({"headers": """'{"ce-id": "1"}'"""}, "sha256:"),
    "an id of another year": ({"id": "'00000000-0000-7000-8000-000000000000'"}, "0000"),
}


def handle(session: Session, message: Message) -> None:
    """Handle anything."""


def key_beside(key: str) -> str:
    """Return another key of the same lane."""
    lane = lane_of(key, uuid7(), Priority.DEFAULT)
    others = (f"beside {n}" for n in count())
    return next(it for it in others if lane_of(it, uuid7(), Priority.DEFAULT) == lane)


def refuse(session: Session, message: Message) -> None:
    raise DeadLetter("not for us")


@asynccontextmanager
async def reading(
    url: str, handler: Callable[..., Any] = handle, **settings: Any
) -> AsyncIterator[RecordedEvents]:
    """Run the consumer billing, which reads the outbox, for the block."""
    add_consumer(url, "billing")
    source = PostgresSource(
        url,
        consumer="billing",
        topics=["*"],
        poll_interval=timedelta(milliseconds=100),
    )
    settings = {"retry": QUICK, **settings}
    async with consuming(url, source, handler, **settings) as events:
        yield events


def insert_row(url: str, odd: Mapping[str, str]) -> None:
    """Insert a message as a writer in plain SQL can."""
    row = {
        "id": "outbox.uuid7()",
        "lane": "16",
        "topic": "'odd'",
        "content_type": "'text/plain'",
        "payload": "'x'::bytea",
        **odd,
    }
    execute(
        url,
        f"INSERT INTO outbox.message ({', '.join(row)})"
        f" VALUES ({', '.join(row.values())})",
    )


async def wait_for_row(url: str, query: str, *values: object) -> None:
    await asyncio.to_thread(wait_for, query, lambda: execute(url, query, values))


@pytest.mark.parametrize(("odd", "known_by"), HOSTILE.values(), ids=HOSTILE)
async def test_an_unreadable_message_is_one_dead_letter_of_the_consumer(
    database_url: str, odd: Mapping[str, str], known_by: str
) -> None:
    async with reading(database_url) as events:
        insert_row(database_url, odd)
        await events.wait_for(MessageDeadLettered)
        insert(database_url, Message("next", b""))
        await events.wait_for(MessageHandled)
    ((_, id, attempts, reason, size),) = execute(database_url, LETTERS)
    assert id.startswith(known_by)
    assert (attempts, size) == (0, 1)
    assert reason
    assert execute(database_url, "SELECT count(*) FROM outbox.dead_letter") == [(0,)]
    assert execute(database_url, UNSETTLED) == [(0,)]


async def test_a_payload_of_any_size_is_handled_or_one_dead_letter_of_the_consumer(
    database_url: str,
) -> None:
    size = 20 * 1024 * 1024
    large = {"payload": f"convert_to(repeat('x', {size}), 'UTF8')"}
    insert_row(database_url, large)
    sizes: list[int] = []

    def measure(session: Session, message: Message) -> None:
        sizes.append(len(message.payload))

    async with reading(database_url, measure) as events:
        await events.wait_for(MessageHandled)
    insert_row(database_url, large)
    async with reading(database_url, refuse) as events:
        await events.wait_for(MessageDeadLettered)
    assert sizes == [size]
    ((_, _, attempts, reason, stored),) = execute(database_url, LETTERS)
    assert (attempts, reason, stored) == (1, "DeadLetter: not for us", size)
    assert execute(database_url, "SELECT count(*) FROM outbox.dead_letter") == [(0,)]
    assert execute(database_url, UNSETTLED) == [(0,)]


async def test_every_message_that_is_given_up_is_a_dead_letter_of_the_consumer(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    poison, refused, failed = (Message(t, b"x") for t in ("poison", "refused", "fails"))
    execute(
        database_url,
        "INSERT INTO inbox.suspect (message_id, message_at, consumer, starts, is_open)"
        " VALUES (%s, inbox.moment_of(%s), 'billing', %s, true)",
        [poison.id, poison.id, QUICK.max_attempts],
    )
    is_fixed = False

    def handle(session: Session, message: Message) -> None:
        if not is_fixed:
            raise DeadLetter("no") if message.topic == "refused" else LookupError("no")

    insert(database_url, poison, refused, failed)
    async with reading(database_url, handle) as events:
        await events.wait_for(MessageDeadLettered, 3)
    letters = {topic: rest for topic, *rest in execute(database_url, LETTERS)}
    assert letters["poison"][:2] == [str(poison.id), QUICK.max_attempts]
    assert "started 3 times and never finished" in letters["poison"][2]
    assert letters["refused"][:2] == [str(refused.id), 1]
    assert letters["fails"][:2] == [str(failed.id), QUICK.max_attempts]
    assert execute(database_url, "SELECT count(*) FROM outbox.dead_letter") == [(0,)]

    def dead_letters(*argv: str) -> str:
        assert main(["dead-letters", *argv, "--database", database_url]) == 0
        return capsys.readouterr().out

    assert dead_letters("list").count("consumer:billing") == 3
    ((id,),) = execute(database_url, "SELECT id FROM inbox.dead_letter LIMIT 1")
    assert "consumer:billing" in dead_letters("show", str(id))
    dead_letters("discard", "--topic=poison", "--reason=known")
    is_fixed = True
    with sessions_of(database_url) as sessions:
        consumer = Consumer(database_url, sessions, name="billing")
        consumer.handles("*")(handle)
        tally = await retry(consumer.retrier())
    assert tally["succeeded"] == 2
    async with reading(database_url, handle) as events:
        insert(database_url, Message("next", b""))
        await events.wait_for(MessageHandled)
    assert {status for status, *_ in states(database_url, "inbox")} == {
        "SUCCEEDED",
        "DISCARDED",
    }
    assert execute(database_url, UNSETTLED) == [(0,)]


async def test_a_replay_to_a_consumer_says_how_many_messages_it_skips(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[UUID] = []

    def handle(session: Session, message: Message) -> None:
        seen.append(message.id)

    forgotten, known = Message("orders", b"", key="k"), Message("orders", b"")
    argv = ["replay", "--since=1h", "--reader=billing", "--database"]
    async with reading(database_url, handle) as events:
        insert(database_url, forgotten, known)
        await events.wait_for(MessageHandled, 2)
    execute(
        database_url, "DELETE FROM inbox.receipt WHERE message_id = %s", [forgotten.id]
    )
    for more in (["--dry-run"], []):
        assert main([*argv, database_url, *more]) == 0
        said = capsys.readouterr().out
        assert "billing is a consumer: it skips 1 of these messages" in said
        assert "handlers' database" in said
        assert ("2 replayed: ready to be handled again" in said) is (not more)
    async with reading(database_url, handle) as events:
        await events.wait_for(MessageHandled)
        await events.wait_for(DuplicateSkipped)
    assert sorted(seen) == sorted([forgotten.id, forgotten.id, known.id])
    assert main([*argv, as_role(database_url, "pillarbox_relay"), "--dry-run"]) == 2
    assert "GRANT pillarbox_consumer" in capsys.readouterr().err


async def test_an_encoded_message_waits_in_the_outbox_for_a_consumer_with_a_codec(
    database_url: str,
) -> None:
    codec = AesGcm({"here": AESGCM.generate_key(256)})
    seen: list[bytes] = []

    def handle(session: Session, message: Message) -> None:
        seen.append(message.payload)

    with sessions_of(database_url) as sessions, sessions.begin() as session:
        add(session, Message("secret", b"1", key="k"), codec=codec)
        add(session, Message("plain", b"2"))
    async with reading(database_url, handle, rollout=timedelta(0)) as events:
        await events.wait_for(CodecMissing)
        await events.wait_for(DeliveryReturned)
        await events.wait_for(MessageHandled)
    assert seen == [b"2"]
    assert execute(database_url, UNSETTLED) == [(1,)]
    async with reading(database_url, handle, codec=codec) as events:
        await events.wait_for(MessageHandled)
    assert seen == [b"2", b"1"]
    assert execute(database_url, "SELECT count(*) FROM inbox.dead_letter") == [(0,)]


async def test_commands_show_a_reading_consumer_as_a_consumer_and_name_no_relay(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*argv: str) -> str:
        main([*argv, "--database", database_url])
        return "".join(capsys.readouterr())

    def handle(session: Session, message: Message) -> None:
        if message.topic == "fails":
            raise LookupError("no such order")

    run("readers", "drop", "main")
    handled, failed = Message("orders", b"", key="a"), Message("fails", b"", key="b")
    behind = Message("orders", b"", key="b")
    said: dict[str, str] = {}
    async with reading(database_url, handle, retry=NEVER) as events:
        insert(database_url, handled, failed, behind)
        await events.wait_for(MessageHandled)
        await events.wait_for(HandlerFailed)
        await wait_for_row(
            database_url,
            "SELECT 1 FROM outbox.message_status WHERE id = %s AND state = 'handled'",
            handled.id,
        )
        await wait_for_row(
            database_url, "SELECT 1 FROM inbox.process WHERE blocked_keys = 1"
        )
        for command in ("status", "blocked", "doctor", "readers list"):
            said[command] = await asyncio.to_thread(run, *command.split())
        shown = json.loads(await asyncio.to_thread(run, "status", "--json"))
        (status,) = shown["databases"]
        said["trace"] = await asyncio.to_thread(run, "trace", str(handled.id))
        said["its key"] = await asyncio.to_thread(run, "trace", str(behind.id))
        said["sessions"] = str(execute(database_url, SESSIONS))
    assert re.search(r"pillarbox consumer \S+ \d+ shared", said["sessions"])
    said["stopped"] = run("trace", str(failed.id))
    insert_row(database_url, {"created_at": "now() - interval '24 hours'"})
    said["left"] = run("doctor")
    said["drop"] = run("readers", "drop", "billing")

    assert (status["processes"]["relays"], status["outbox"]["messages"]) == ([], 0)
    (consumer,) = status["consumers"]
    assert (consumer["replicas"], consumer["lag"]["messages"]) == (1, 2)
    assert "billing" in said["blocked"]
    assert "handled after" in said["trace"]
    assert "due, but not handled yet by billing" in said["its key"]
    assert "failed 1 time, next attempt" in said["stopped"]
    assert "reader billing has a backlog of 3 messages" in said["left"]
    held = "and keeps 2 days, [0-9]+ kB, from being dropped"
    assert re.search(held, said["left"].replace("\n", " "))
    assert "the consumer billing is not running, and its lag" in said["left"]
    assert "has a backlog of 3 messages" in said["drop"]
    for name, text in said.items():
        assert "pillarbox relay" not in text, name
        assert "published by" not in text, name
        assert "from direct" not in text, name
        assert "check direct" not in text, name
    assert "published" not in said["trace"] + said["its key"] + said["stopped"]


async def test_jobs_batches_and_cancellation_work_as_over_a_broker(
    database_url: str,
) -> None:
    assert main(["readers", "drop", "main", "--database", database_url]) == 0
    add_consumer(database_url, "billing")
    batches: list[int] = []
    begun = asyncio.Event()
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(database_url, sessions, name="billing", retry=QUICK)

        @consumer.handles_batch("many", max_size=5)
        async def tally(session: AsyncSession, messages: Sequence[Message]) -> None:
            batches.append(len(messages))

        @consumer.job("long", lease=timedelta(seconds=10))
        async def render(job: AsyncJob, message: Message) -> None:
            begun.set()
            await asyncio.Event().wait()

        long = Message("long", b"", key="k")
        insert(database_url, long, *(Message("many", b"") for _ in range(5)))
        async with running(consumer) as events, asyncio.timeout(60):
            await begun.wait()
            await events.wait_for(MessageHandled, 5)
            said = await asyncio.to_thread(
                main, ["cancel", str(long.id), "--database", database_url]
            )
            await events.wait_for(MessageCancelled)
            insert(database_url, Message("many", b"", key="k"))
            await events.wait_for(MessageHandled, 6)
    assert said == 0
    assert sum(batches) == 6
    assert execute(database_url, UNSETTLED) == [(0,)]
    with browsing(database_url) as browser:
        pages = [browser.get(path) for path in ("/", f"/message?id={long.id}")]
        pages.append(browser.get("/messages?state=handled"))
    assert "billing" in pages[0]
    assert "job cancelled" in pages[1]
    assert "handled" in pages[1]
    assert "published" not in pages[1]
    assert "handled by billing" in pages[2]


async def test_a_message_whose_handler_runs_for_long_is_shown_as_being_handled(
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(window_lane, "OPEN_AFTER", 0.0)
    add_consumer(database_url, "billing")
    end = asyncio.Event()

    async def handle(session: AsyncSession, message: Message) -> None:
        if message.key == "slow":
            await end.wait()

    slow = Message("t", b"", key="slow")
    same_lane = Message("t", b"", key=key_beside("slow"))
    async with reading(database_url, handle) as events:
        insert(database_url, slow, same_lane)
        await events.wait_for(MessageHandled)
        await wait_for_row(
            database_url, "SELECT 1 FROM outbox.deferral WHERE cause = 'open'"
        )
        argv = ["trace", str(slow.id), "--database", database_url]
        assert await asyncio.to_thread(main, argv) == 0
        end.set()
        await events.wait_for(MessageHandled, 2)
    assert "being handled" in capsys.readouterr().out
    assert main(argv) == 0
    after = capsys.readouterr().out
    assert "acked" in after
    assert "published" not in after
