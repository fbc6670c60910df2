"""Several readers of one outbox: each gets its messages and has its own state."""

import asyncio
import json
import re
import shlex
from contextlib import AbstractAsyncContextManager
from itertools import product
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.rows import TupleRow

from pillarbox import Message
from pillarbox.outbox.administration.connection import administration
from pillarbox.outbox.administration.doctor import examine_quickly
from pillarbox.outbox.administration.readers import (
    add_reader,
    drop_reader,
    list_readers,
)
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.lane import LANES
from pillarbox.relay.events import (
    BatchSettled,
    LeaseTaken,
    MessageDeadLettered,
    ReaderDropped,
)
from pillarbox.relay.publisher import Acked, Nacked
from tests.fixtures import positions
from tests.fixtures.doctor import Doctor
from tests.fixtures.postgres import ADD_MAIN
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import (
    LONG,
    PATIENT,
    Running,
    insert,
    numbered,
    running,
    unsettled,
)
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for
from tests.relay.test_sharing import wait_until_held


def add(
    url: str, name: str, *topics: str, broker: str | None = "redis://b", **options: Any
) -> None:
    with administration(url, application_name="test") as connection:
        add_reader(connection, name, topics or ["*"], broker=broker, **options)


def drop(url: str, name: str, *, discard: bool = False) -> None:
    with administration(url, application_name="test") as connection:
        drop_reader(connection, name, discard=discard)


ADD = "SELECT outbox.add(%s, '{}'::jsonb, tenant => %s, key => 'k')"


def as_marked(topic: str, *marks: str) -> list[Message]:
    """Return messages of one key that their tenants tell apart."""
    return [Message(topic, b"", tenant=mark, key="k") for mark in marks]


def marks_of(publisher: ScriptedPublisher) -> list[str | None]:
    return [message.tenant for message in publisher.acked]


def states(url: str, reader: str | None, column: str = "topic") -> dict[str, str]:
    return dict(
        execute(
            url,
            f"SELECT {column}, state FROM outbox.message_status"
            " WHERE reader IS NOT DISTINCT FROM %s",
            (reader,),
        )
    )


def holding(url: str) -> set[tuple[str | None, str, str]]:
    """Return reader, topic and cause of what holds a partition."""
    return set(
        execute(
            url,
            "SELECT u.reader, u.topic, u.cause"
            "  FROM outbox.partitions('outbox.message') AS p,"
            " outbox.unsettled_messages(p.partition, p.starts_at, p.ends_at) AS u",
        )
    )


def relay_of(
    url: str, reader: str, publisher: ScriptedPublisher
) -> AbstractAsyncContextManager[Running]:
    """Run a relay of a reader for the block."""
    broker = "redis://a" if reader == "main" else "redis://b"
    return running(url, publisher, reader=reader, broker=broker)


async def test_each_reader_gets_everything_in_order(database_url: str) -> None:
    add(database_url, "audit")
    main, audit = ScriptedPublisher(), ScriptedPublisher()
    async with (
        relay_of(database_url, "main", main) as one,
        relay_of(database_url, "audit", audit) as two,
    ):
        await wait_until_held(one, LANES)
        await wait_until_held(two, LANES)
        insert(database_url, *numbered("abc", 5))
        for publisher in (main, audit):
            await publisher.until_acked(15)
            for key in "abc":
                ours = [topic for topic in publisher.topics() if topic[0] == key]
                assert ours == [f"{key}/{n}" for n in range(5)]


async def test_a_reader_gets_only_its_topics_and_others_dont_hold_it(
    database_url: str,
) -> None:
    add(database_url, "webhooks", "invoices.*", "refunds")
    insert(
        database_url,
        *(
            Message(topic, b"")
            for topic in ("invoices.sent", "orders", "refunds", "refunds2")
        ),
    )
    publisher = ScriptedPublisher()
    async with relay_of(database_url, "webhooks", publisher):
        await publisher.until_acked(2)
    assert sorted(publisher.topics()) == ["invoices.sent", "refunds"]
    assert states(database_url, "webhooks") == {
        "invoices.sent": "published",
        "refunds": "published",
    }
    assert {reader for reader, *_ in holding(database_url)} == {"main"}
    positions.publish(database_url, "reader = 'main'")
    assert holding(database_url) == set()


async def test_after_many_messages_of_others_its_position_is_stored(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pillarbox.outbox.log.claim._MOST_SKIPPED", 3)
    add(database_url, "webhooks", "invoices")
    stored = "SELECT count(*), coalesce(sum(messages), 0) FROM outbox.position"
    publisher = ScriptedPublisher()
    async with relay_of(database_url, "webhooks", publisher) as relay:
        await wait_until_held(relay, LANES)
        insert(database_url, *(Message("orders", b"", key="k") for _ in range(3)))
        await relay.events.wait_for(BatchSettled)
        insert(database_url, Message("invoices", b"", key="other"))
        await publisher.until_acked(1)
        await relay.events.wait_for(BatchSettled, 2)
    assert execute(database_url, stored)[0][1] == 1


async def test_a_new_reader_gets_what_commits_after_it_was_added(
    database_url: str,
) -> None:
    insert(database_url, Message("before", b""))
    statement = "SELECT outbox.add('open', '{}'::jsonb)"
    with psycopg.connect(database_url) as writer:
        writer.execute(statement)
        insert(database_url, Message("beside", b""))
        add(database_url, "late")
        writer.commit()
    insert(database_url, Message("after", b""))
    assert states(database_url, "late") == {"open": "ready", "after": "ready"}
    unsettled = "SELECT topic FROM outbox.unsettled_message WHERE reader = 'late'"
    assert sorted(execute(database_url, unsettled)) == [("after",), ("open",)]

    publisher = ScriptedPublisher()
    async with relay_of(database_url, "late", publisher):
        await publisher.until_acked(2)
    assert sorted(publisher.topics()) == ["after", "open"]


async def test_a_new_reader_may_begin_with_the_oldest(database_url: str) -> None:
    insert(database_url, *numbered("k", 3))
    add(database_url, "audit", from_oldest=True)
    publisher = ScriptedPublisher()
    async with relay_of(database_url, "audit", publisher):
        await publisher.until_acked(3)
    assert publisher.topics() == ["k/0", "k/1", "k/2"]


async def test_a_topic_that_is_added_beside_a_relay_is_not_passed_by_it(
    database_url: str,
) -> None:
    """Its lanes are not refreshed meanwhile."""
    add(database_url, "hooks", "orders")
    publisher = ScriptedPublisher()
    async with running(
        database_url,
        publisher,
        reader="hooks",
        broker="redis://b",
        sweep_interval=LONG,
    ) as relay:
        await wait_until_held(relay, LANES)
        insert(database_url, *as_marked("invoices", "before"))
        with psycopg.connect(database_url) as writer:
            writer.execute(ADD, ("invoices", "open"))
            insert(database_url, *as_marked("orders", "passes it"))
            await publisher.until_acked(1)
            add(database_url, "hooks", "invoices", "refunds.*")
            insert(database_url, *as_marked("invoices", "after"))
            await publisher.until_acked(2)
            writer.commit()
        insert(database_url, *as_marked("refunds.paid", "prefix"))
        await publisher.until_acked(4)
    assert marks_of(publisher) == ["passes it", "after", "open", "prefix"]
    assert states(database_url, "hooks", "tenant") == dict.fromkeys(
        marks_of(publisher), "published"
    )
    assert {reader for reader, *_ in holding(database_url)} == {"main"}


async def test_each_topic_of_a_reader_begins_when_it_was_added(
    database_url: str,
) -> None:
    add(database_url, "hooks", "orders")
    insert(database_url, *as_marked("invoices", "before"))
    insert(database_url, *as_marked("orders", "first"))
    add(database_url, "hooks", "*")
    insert(database_url, *as_marked("invoices", "second"))
    unsettled = "SELECT tenant FROM outbox.unsettled_message WHERE reader = 'hooks'"
    assert sorted(execute(database_url, unsettled)) == [("first",), ("second",)]
    held = {topic for reader, topic, _ in holding(database_url) if reader == "hooks"}
    assert held == {"orders", "invoices"}
    publisher = ScriptedPublisher()
    async with relay_of(database_url, "hooks", publisher):
        await publisher.until_acked(2)
        insert(database_url, *as_marked("refunds", "third"))
        await publisher.until_acked(3)
    assert marks_of(publisher) == ["first", "second", "third"]


def test_topics_are_added_by_one_process_after_the_other(database_url: str) -> None:
    add(database_url, "hooks", "orders")
    subscribe = "SELECT outbox.subscribe('hooks', ARRAY['invoices'], NULL)"
    with (
        psycopg.connect(database_url) as first,
        psycopg.connect(database_url, autocommit=True) as second,
    ):
        first.execute(subscribe)
        second.execute("SET lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            second.execute(subscribe)
        first.commit()
        assert second.execute(subscribe).fetchall() == [(False,)]
    begun = "SELECT has_begun FROM outbox.subscription WHERE topic = 'invoices'"
    assert execute(database_url, begun) == [(True,)]


async def test_a_topic_begins_after_what_claims_have_passed_while_it_was_added(
    database_url: str,
) -> None:
    add(database_url, "hooks", "orders")
    publisher = ScriptedPublisher()
    subscribe = "SELECT outbox.subscribe('hooks', %s, NULL)"
    async with relay_of(database_url, "hooks", publisher) as relay:
        await wait_until_held(relay, LANES)
        with psycopg.connect(database_url) as administrator:
            assert administrator.execute(subscribe, (["invoices"],)).fetchall() == [
                (True,)
            ]
            insert(database_url, *as_marked("invoices", "passed"))
            insert(database_url, *as_marked("orders", "passes it"))
            await publisher.until_acked(1)
            administrator.commit()
            administrator.execute(subscribe, ([],))
        insert(database_url, *as_marked("invoices", "after"))
        await publisher.until_acked(2)
    assert marks_of(publisher) == ["passes it", "after"]
    assert set(states(database_url, "hooks", "tenant")) == {"passes it", "after"}


async def test_a_topic_that_begins_at_the_oldest_message_includes_what_was_passed(
    unread_database_url: str,
) -> None:
    """In a lane that is settled, and in one that has been idle since."""
    url, publisher = unread_database_url, ScriptedPublisher()
    add(url, "hooks", "orders")
    subscribe = "SELECT outbox.subscribe('hooks', '{invoices}', NULL, false, NULL)"
    async with relay_of(url, "hooks", publisher) as relay:
        await wait_until_held(relay, LANES)
        insert(url, Message("invoices", b"", tenant="idle", key="other"))
        insert(url, *as_marked("invoices", "passed"), *as_marked("orders", "passes it"))
        await publisher.until_acked(1)
        with psycopg.connect(url) as writer:
            writer.execute(ADD, ("invoices", "open"))
            execute(url, subscribe)
            await publisher.until_acked(3)
        await publisher.until_acked(4)
        await asyncio.to_thread(wait_for, "settled", lambda: not unsettled(url))
    marks = marks_of(publisher)
    assert {*marks} == {"passes it", "passed", "idle", "open"}
    assert marks.index("passed") < marks.index("open")


async def test_a_dropped_reader_returns_without_what_it_had_left(
    database_url: str,
) -> None:
    add(database_url, "hooks", "orders")
    publisher = ScriptedPublisher(lambda message: Nacked("no"))
    async with running(
        database_url, publisher, reader="hooks", broker="redis://b", retry=PATIENT
    ) as relay:
        await relay.events.wait_for(LeaseTaken)
        insert(database_url, *as_marked("orders", "refused", "blocked"))
        await relay.events.wait_for(BatchSettled)
        # Its outcome comes when the reader has returned.
        publisher.open.clear()
        insert(database_url, Message("orders", b"", tenant="in flight", key="other"))
        await publisher.until(lambda: len(publisher.calls) == 2)
        drop(database_url, "hooks", discard=True)
        insert(database_url, *as_marked("orders", "between"))
        with pytest.raises(
            ConfigError, match=r"reader=hooks: was dropped, .* only for"
        ):
            add(database_url, "hooks", "orders", from_oldest=True)
        add(database_url, "hooks", "orders", "invoices", broker="redis://b")
        publisher.script = lambda message: (
            Nacked("no") if message.tenant == "in flight" else Acked()
        )
        publisher.open.set()
        insert(database_url, *as_marked("orders", "after"))
        await publisher.until(lambda: "after" in marks_of(publisher))
    assert marks_of(publisher) == ["after"]
    assert states(database_url, "hooks", "tenant") == {"after": "published"}
    assert {reader for reader, *_ in holding(database_url)} == {"main"}
    ended = "SELECT outcome, reason FROM outbox.deferral WHERE cause = 'settled'"
    assert execute(database_url, ended) == [("discarded", "the reader was dropped")] * 2
    with administration(database_url, application_name="test") as connection:
        (reader,) = list_readers(connection, "hooks")
    assert (reader.topics, reader.dropped_at) == (["invoices", "orders"], None)
    assert reader.messages == 0


def test_the_command_adds_topics_to_a_reader(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str, name: str = "hooks") -> tuple[int, str]:
        code = main(["readers", "add", name, *arguments, "--database", database_url])
        said = capsys.readouterr()
        return code, said.out + said.err

    assert run("--topic", "a")[0] == 2
    start = "start its relays with pillarbox relay --reader hooks\n"
    assert run("--topic", "a", "--broker", "redis://b") == (0, f"hooks gets a; {start}")
    assert run("--topic", "b.*") == (0, "hooks gets b.*\n")
    code, said = run()
    assert (code, "reader=hooks: exists; give --topic" in said) == (2, True)
    assert run("--consumer", name="billing") == (0, "billing gets *\n")
    code, said = run("--consumer", "--broker", "redis://b", name="other")
    assert (code, "a consumer has no broker; omit" in said) == (2, True)
    with administration(database_url, application_name="test") as connection:
        (reader,) = list_readers(connection, "hooks")
        (billing,) = list_readers(connection, "billing")
    assert reader.topics == ["a", "b.*"]
    assert billing.is_consumer


def test_what_a_reader_can_not_get_any_more_is_refused(database_url: str) -> None:
    def refuse(reason: str, *topics: str, **options: Any) -> None:
        with (
            administration(database_url, application_name="test") as connection,
            pytest.raises(ConfigError, match=reason),
        ):
            add_reader(connection, "hooks", topics or None, **options)

    refuse("reader=hooks: no such reader; pass --broker", "a")
    add(database_url, "hooks", "a")
    refuse("reader=hooks: exists; give --topic", broker="redis://b")
    refuse("gets other topics only from now on", "b", from_oldest=True)
    refuse("exists, and gets its messages; omit --discard", "b", discard=True)
    refuse("messages go to redis://b/0, not to redis://c/0", "b", broker="redis://c")


async def test_an_unknown_reader_is_refused_and_holds_nothing(
    database_url: str,
) -> None:
    with pytest.raises(ConfigError, match=r"reader=typo: .*readers add typo"):
        async with relay_of(database_url, "typo", ScriptedPublisher()):
            pass
    insert(database_url, Message("orders", b""))
    assert states(database_url, "typo") == {}


async def test_a_key_blocked_at_one_reader_is_free_at_the_other(
    database_url: str,
) -> None:
    add(database_url, "webhooks")
    main, hooks = ScriptedPublisher(), ScriptedPublisher(lambda message: Nacked("no"))
    async with relay_of(database_url, "webhooks", hooks) as relay:
        insert(database_url, *numbered("k", 2))
        await relay.events.wait_for(LeaseTaken)
        await hooks.until(lambda: bool(hooks.calls))
        async with relay_of(database_url, "main", main):
            await main.until_acked(2)
        await relay.events.wait_for(MessageDeadLettered, 2)
    assert set(states(database_url, "webhooks").values()) == {"dead_lettered"}
    assert states(database_url, "main") == {"k/0": "published", "k/1": "published"}
    origins = execute(database_url, "SELECT DISTINCT origin FROM outbox.dead_letter")
    assert origins == [("relay:webhooks",)]


async def test_a_dropped_reader_stops_and_holds_no_day(database_url: str) -> None:
    add(database_url, "webhooks")
    async with relay_of(database_url, "webhooks", ScriptedPublisher()) as relay:
        await wait_until_held(relay, LANES)
        drop(database_url, "webhooks")
        await relay.events.wait_for(ReaderDropped)
        await wait_until_held(relay, 0)
    insert(database_url, Message("orders", b""))
    assert {reader for reader, *_ in holding(database_url)} == {"main"}
    with pytest.raises(ConfigError, match=r"was dropped; .*readers add webhooks"):
        async with relay_of(database_url, "webhooks", ScriptedPublisher()):
            pass


def test_a_reader_with_messages_to_publish_is_not_dropped_by_mistake(
    database_url: str,
) -> None:
    add(database_url, "webhooks")
    insert(database_url, Message("orders", b""), Message("orders", b""))
    with pytest.raises(ConfigError, match=r"has a backlog of 2 messages, .*--discard"):
        drop(database_url, "webhooks")
    drop(database_url, "webhooks", discard=True)
    with administration(database_url, application_name="test") as connection:
        main, dropped = list_readers(connection)
    assert (main.reader, main.messages, main.dropped_at) == ("main", 2, None)
    assert (dropped.reader, dropped.messages) == ("webhooks", 0)
    assert dropped.dropped_at is not None


async def test_a_message_that_no_reader_gets_is_reported_and_kept(
    database_url: str, doctor: Doctor
) -> None:
    insert(database_url, Message("orders", b""))
    positions.publish(database_url)
    drop(database_url, "main")
    add(database_url, "webhooks", "invoices")
    insert(database_url, Message("mistyped", b""), Message("invoices", b""))
    publisher = ScriptedPublisher()
    async with relay_of(database_url, "webhooks", publisher):
        await publisher.until_acked(1)
    assert publisher.topics() == ["invoices"]
    _, findings = doctor(database_url)
    (finding,) = (it["finding"] for it in findings if it["check"] == "unrouted")
    assert finding.startswith("no reader gets 1 message of mistyped, the oldest from ")
    assert states(database_url, None) == {"mistyped": "unrouted", "orders": "discarded"}
    assert (None, "mistyped", "unrouted") in holding(database_url)
    unrouted = "SELECT topic FROM outbox.unsettled_message WHERE state = 'unrouted'"
    assert execute(database_url, unrouted) == [("mistyped",)]
    # The monitor has no right to read payloads.
    with psycopg.connect(database_url) as connection:
        connection.execute("SET ROLE pillarbox_monitor")
        assert connection.execute(unrouted).fetchall() == [("mistyped",)]

    add(database_url, "nobody", "mistyped", broker=None, discard=True, from_oldest=True)
    assert states(database_url, None)["mistyped"] == "discarded"
    assert not any(topic == "mistyped" for _, topic, _ in holding(database_url))


@pytest.mark.parametrize(
    ("name", "topic", "said"),
    [
        ("", "*", "1 to 512 bytes"),
        ("ä" * 257, "*", "1 to 512 bytes"),
        ("webhooks", "", "prefix followed by a star"),
        ("webhooks", "a*b", "prefix followed by a star"),
        ("webhooks", "*.x", "prefix followed by a star"),
    ],
)
def test_names_and_topics_of_readers_are_checked(
    database_url: str, name: str, topic: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        add(database_url, name, topic)
    with pytest.raises(ConfigError, match="broker: must be a URL"):
        add(database_url, "webhooks", broker="example.com/hooks")


def test_a_reader_without_a_relay_is_found_although_another_has_one(
    database_url: str,
) -> None:
    def backlog() -> dict[str, str]:
        with administration(database_url, application_name="test") as connection:
            _, findings = examine_quickly(connection)
        return {it.finding: it.remedy for it in findings if it.check == "backlog"}

    def run(reader: str) -> None:
        beat = (
            "SELECT outbox.beat(gen_random_uuid(), 'relay', %s, 'host 1', 'redis://b',"
            " NULL, NULL, 0, 0, false)"
        )
        execute(database_url, beat, (reader,))

    add(database_url, "webhooks")
    add(database_url, "nothing", broker=None, discard=True)
    insert(database_url, Message("orders", b""))
    execute(
        database_url,
        "INSERT INTO outbox.message (created_at, id, lane, topic, content_type,"
        " payload) VALUES (now() - interval '2 minutes', outbox.uuid7(), 0, 't', 'c',"
        " '')",
    )
    run("webhooks")
    (finding,) = backlog()
    assert finding.startswith(
        "no relay is running, and the oldest due message has been w"
    )

    execute(database_url, "DELETE FROM outbox.process")
    run("main")
    found = backlog()
    remedy = found["no relay of reader webhooks is running"]
    assert remedy.startswith("pillarbox relay --broker redis://b/0 --reader webhooks ")


PATTERNS = st.from_regex(r"[ab]{0,3}\*|[ab]{1,3}", fullmatch=True)


def includes(pattern: str, topic: str) -> bool:
    prefix = pattern.removesuffix("*")
    return topic.startswith(prefix) if "*" in pattern else topic == pattern


@given(PATTERNS, PATTERNS)
def test_topics_overlap_if_a_message_can_belong_to_both(
    connection: psycopg.Connection[TupleRow], a: str, b: str
) -> None:
    topics = ["".join(it) for n in range(1, 5) for it in product("ab", repeat=n)]
    expected = any(includes(a, topic) and includes(b, topic) for topic in topics)
    ((found,),) = connection.execute("SELECT outbox.overlap(%s, %s)", (a, b))
    assert found == expected


def test_readers_are_added_one_after_the_other(unread_database_url: str) -> None:
    """Of two that start at once, the first begins at the oldest message."""
    url = unread_database_url
    subscribe = "SELECT outbox.subscribe(%s, '{orders}', 'direct', false, NULL)"
    with (
        psycopg.connect(url) as first,
        psycopg.connect(url, autocommit=True) as second,
    ):
        first.execute(subscribe, ("one",))
        second.execute("SET lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            second.execute(subscribe, ("two",))
        first.commit()
        second.execute(subscribe, ("two",))
    begun = "SELECT reader, since_seq FROM outbox.subscription ORDER BY reader"
    insert(url, Message("orders", b""))
    ((one, _), (two, _)) = execute(url, begun)
    assert (one, two) == ("one", "two")
    since = "SELECT count(*) FROM outbox.subscription WHERE since::text = '1:1:'"
    assert execute(url, since) == [(1,)]


def test_before_the_first_reader_there_is_one_notice(
    unread_database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = unread_database_url

    def findings(command: str) -> list[tuple[str, str, str]]:
        main([command, "--json", "--database", url])
        said = json.loads(capsys.readouterr().out)
        (shown,) = said["databases"] if command == "status" else [said]
        found = shown["findings"]
        return [
            (it["severity"], it["finding"], it["remedy"])
            for it in found
            if it["check"] in {"unrouted", "readers", "backlog"}
        ]

    for command in ("doctor", "status"):
        assert findings(command) == []
    insert(url, *(Message(topic, b"") for topic in "aab"))
    for command in ("doctor", "status"):
        ((severity, finding, remedy),) = findings(command)
        assert severity == "hint"
        assert finding.startswith("3 messages have no reader yet, the oldest from ")
        assert "pillarbox relay --broker URL  # or pillarbox consume" in remedy
    # Its day is kept.
    assert positions.count_holding(url) == 3
    execute(
        url,
        "INSERT INTO outbox.message (created_at, id, lane, topic, content_type,"
        " payload) VALUES (now() - interval '25 hours', outbox.uuid7(), 0, 't', 'c',"
        " '')",
    )
    ((severity, finding, _),) = findings("doctor")
    assert (severity, finding[:10]) == ("warning", "4 messages")


def test_where_consumers_read_the_doctor_asks_for_no_relay(
    unread_database_url: str, doctor: Doctor
) -> None:
    add(unread_database_url, "billing", broker=None, for_consumer=True)
    insert(unread_database_url, Message("orders", b""))
    _, found = doctor(unread_database_url)
    assert [it for it in found if "relay" in it["finding"] + it["remedy"]] == []
    # One from a migration of before.
    execute(unread_database_url, ADD_MAIN)
    _, (one, *more) = doctor(unread_database_url)
    assert (one["severity"], more) == ("warning", [])
    assert one["finding"] == "no relay of reader main is running"
    assert one["remedy"].endswith("pillarbox readers drop main")


def test_the_commands_for_messages_that_no_reader_gets_can_be_pasted(
    unread_database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = unread_database_url
    add(url, "billing", "orders")
    topics = ["refunds", "a topic", "o'hara", *(f"t{n}" for n in range(9))]
    insert(url, *(Message(topic, b"") for topic in topics))

    def finding() -> tuple[str, str] | None:
        capsys.readouterr()
        main(["status", "--json", "--database", url])
        found = json.loads(capsys.readouterr().out)["databases"][0]["findings"]
        return next(
            (
                (it["finding"], it["remedy"])
                for it in found
                if it["check"] == "unrouted"
            ),
            None,
        )

    found = finding()
    assert found is not None
    said, remedy = found
    assert re.fullmatch(
        r"no reader gets 12 messages of a topic, o'hara, refunds, t0, .* and 2 topics"
        r" more, the oldest from \S+ \S+; they keep 1 day, [\d,]+ kB, from being"
        r" dropped",
        said,
    )
    discard = remedy.partition("to discard them, ")[2]
    assert main([*shlex.split(discard)[1:], "--database", url]) == 0
    found = finding()
    assert found is not None
    assert found[0].startswith("no reader gets 2 messages of t7, t8, the oldest from ")
    add_them = remedy_words(found[1].partition("  #")[0], "hooks", "redis://b")
    assert main([*add_them, "--database", url]) == 0
    assert finding() is None
    assert states(url, "hooks") == {"t7": "ready", "t8": "ready"}


def remedy_words(remedy: str, name: str, broker: str) -> list[str]:
    """Return the arguments of a command, with its placeholders filled in."""
    values = {"NAME": name, "URL": broker}
    return [values.get(word, word) for word in shlex.split(remedy)[1:]]
