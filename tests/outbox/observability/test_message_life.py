"""The life of a message, read from the tables of its databases."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg

from pillarbox import Message
from pillarbox.outbox.administration.connection import (
    AdministrationConnection,
    administration,
)
from pillarbox.outbox.lane import Priority
from pillarbox.outbox.observability.message_life import (
    Found,
    Life,
    State,
    Trace,
    read_lives_of_key,
    read_trace,
)
from tests.acceptance.relays import as_role
from tests.fixtures import positions
from tests.fixtures.dead_letters import give_up
from tests.fixtures.family import RECEIVE, handle
from tests.fixtures.positions import defer, publish, replay
from tests.fixtures.presence import record_process
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute

IN_VIEWS = """
    SELECT at, step, source, due_at, by, reason FROM outbox.message_life
     WHERE message_id = %(id)s
     UNION ALL
    SELECT at, step, source, due_at, by, reason FROM inbox.message_life
     WHERE message_id = %(id)s
"""


@contextmanager
def opened(url: str) -> Iterator[AdministrationConnection]:
    with administration(
        as_role(url, "pillarbox_monitor"), application_name="pillarbox trace"
    ) as connection:
        yield connection


def trace(url: str, id: UUID | str, **options: Any) -> Trace:
    """Read a trace in the role of the monitor."""
    with opened(url) as connection:
        return read_trace({"shop": connection}, UUID(str(id)), **options)


def tree(life: Life) -> Iterator[Life]:
    """Yield a message and all that it caused."""
    yield life
    for caused in life.caused:
        yield from tree(caused)


def steps(life: Life) -> list[str]:
    return [it.what for it in life.steps]


def caused_by(cause: Message, topic: str) -> Message:
    return Message(topic, b"", headers={"causation-id": str(cause.id)})


def test_a_message_waits_for_a_relay_and_is_published_and_handled(
    database_url: str,
) -> None:
    message = Message("orders.placed", b"{}", key="k", tenant="acme")
    insert(database_url, message)
    life = trace(database_url, message.id).life
    assert life.state is State.READY
    assert "no relay is running" in (life.waits or "")
    publish(database_url)
    handle(database_url, message)

    found = trace(database_url, message.id)

    assert found.found is Found.FOUND
    assert steps(found.life) == ["added", "published", "handled"]
    assert found.life.state is State.PUBLISHED
    (envelope,) = found.life.envelopes
    assert (envelope.topic, envelope.key) == ("orders.placed", "k")
    assert (envelope.tenant, envelope.payload_bytes) == ("acme", 2)
    ((handling),) = found.life.handlings
    assert (handling.consumer, handling.what) == ("billing", "handled")
    assert (found.life.waits, found.unknown) == (None, ())


def test_a_refused_message_waits_is_dead_lettered_once_and_retried(
    database_url: str,
) -> None:
    message = Message("t", b"")
    insert(database_url, message)
    defer(database_url, "refused", attempts=1, reason="no such queue")
    defer(database_url, "refused", attempts=2, reason="still no such queue")
    life = trace(database_url, message.id).life
    assert [(it.what, it.attempts, it.reason) for it in life.steps[1:]] == [
        ("refused", 1, "no such queue"),
        ("refused", 2, "still no such queue"),
    ]
    assert life.state is State.WAITING
    assert life.waits is not None
    assert "refused 2 times" in life.waits
    assert "still no such queue" in life.waits

    positions.give_up(database_url)
    life = trace(database_url, message.id).life
    assert steps(life) == ["added", "refused", "refused", "dead_lettered"]

    give_up(database_url, message, reason="no such topic")
    execute(
        database_url,
        "UPDATE outbox.dead_letter SET status = 'SUCCEEDED', retry_count = 2,"
        " updated_at = now()",
    )
    life = trace(database_url, message.id).life
    assert life.state is State.DEAD_LETTERED
    assert {"dead_lettered", "dead_letter", "retry_succeeded"} <= set(steps(life))
    (retried,) = [it for it in life.steps if it.what == "retry_succeeded"]
    assert (retried.attempts, retried.consumer) == (2, None)


def test_a_blocked_message_names_the_message_that_blocks_it(
    database_url: str,
) -> None:
    head, behind = Message("head", b"", key="k"), Message("behind", b"", key="k")
    insert(database_url, head, behind)
    defer(database_url, "refused", "topic = 'head'", attempts=1)
    defer(database_url, "blocked", "topic = 'behind'")

    life = trace(database_url, behind.id).life

    assert life.state is State.BLOCKED
    assert life.waits is not None
    assert str(head.id) in life.waits


def test_a_schedule_a_publication_and_its_replay_are_all_kept(
    database_url: str,
) -> None:
    soon = datetime.now(UTC) + timedelta(hours=1)
    message = Message("t", b"", available_at=soon)
    insert(database_url, message)
    defer(database_url, "scheduled", seconds=3600)
    waiting = trace(database_url, message.id).life
    assert waiting.state is State.SCHEDULED
    assert (waiting.waits or "").startswith("scheduled for ")
    publish(database_url)
    first = trace(database_url, message.id).life.published_at
    replay(database_url)
    publish(database_url)

    life = trace(database_url, message.id).life

    assert steps(life) == ["added", "scheduled", "published", "replayed", "published"]
    assert life.steps[0].due_at == soon
    assert (life.replays, life.published_at) == (1, first)
    assert life.steps[3].by
    assert life.state is State.PUBLISHED


def test_a_dead_letter_of_a_consumer_is_shown_until_it_is_discarded(
    database_url: str,
) -> None:
    message = Message("t", b"")
    insert(database_url, message)
    publish(database_url)
    give_up(database_url, message, schema="inbox", reason="ValueError: no")
    pending = trace(database_url, message.id).life
    with psycopg.connect(database_url) as connection:
        connection.execute(RECEIVE, (message.id, message.id, "billing"))
        connection.execute(
            "UPDATE inbox.dead_letter SET status = 'DISCARDED', updated_at = now(),"
            " discard_reason = 'was a test', discarded_by = 'ann'"
        )

    life = trace(database_url, message.id).life

    assert pending.handlings[0].what == "dead_letter"
    assert pending.handlings[0].reason == "ValueError: no"
    # The receipt written by the discard does not count as handled.
    assert life.handlings[0].what == "discarded"
    assert (life.steps[-1].by, life.steps[-1].reason) == ("ann", "was a test")


def test_only_failures_of_its_own_key_or_topic_are_shown(database_url: str) -> None:
    mine, same_key, other = (
        Message("orders.paid", b"", key="k"),
        Message("refunds", b"", key="k"),
        Message("mails", b"", key="x"),
    )
    insert(database_url, mine, same_key, other)
    reasons = {
        "topic": f"orders.paid {other.id}: no",
        "key": f"refunds {same_key.id}: no",
        "other": f"mails {other.id}: no",
        "gone": f"mails {Message('t', b'').id}: no",
        "broker": "connection refused",
    }
    for name, reason in reasons.items():
        values = {"failing": timedelta(minutes=1), "reason": reason}
        record_process(database_url, "consumer", name, **values)

    found = trace(database_url, mine.id)

    assert {it.name for it in found.failing} == {"topic", "key", "broker"}


def test_an_unfinished_start_and_a_job_are_shown(
    database_url: str,
) -> None:
    message = Message("t", b"")
    insert(database_url, message)
    publish(database_url)
    execute(
        database_url,
        "INSERT INTO inbox.suspect (message_id, message_at, consumer, starts)"
        " SELECT %s::uuid, inbox.moment_of(%s::uuid), 'shipping', 2",
        (message.id, message.id),
    )
    execute(
        database_url,
        "INSERT INTO inbox.job (message_id, message_at, consumer, topic, state,"
        " attempts, started_at, worker) SELECT %s::uuid, inbox.moment_of(%s::uuid),"
        " 'reports', 't', 'in_progress', 1, now() + interval '1 second', 'host:7'",
        (message.id, message.id),
    )

    handlings = trace(database_url, message.id).life.handlings

    found = {it.consumer: (it.what, it.attempts) for it in handlings}
    assert found["shipping"] == ("started", 2)
    assert found["reports"][0] == "job_started"


def test_the_causes_and_effects_of_a_message_form_a_tree(
    database_url: str,
) -> None:
    first = Message("orders.placed", b"")
    second = caused_by(first, "payments.requested")
    third = caused_by(second, "payments.made")
    other = caused_by(second, "emails.sent")
    insert(database_url, first, second, third, other)
    publish(database_url)

    found = trace(database_url, second.id)

    assert [it.id for it in found.causes] == [str(first.id)]
    assert [it.topic for it in found.life.caused] == [
        "payments.made",
        "emails.sent",
    ]
    assert all(it.state is State.PUBLISHED for it in tree(found.life))
    whole = trace(database_url, first.id)
    assert [it.topic for it in tree(whole.life)] == [
        "orders.placed",
        "payments.requested",
        "payments.made",
        "emails.sent",
    ]
    cut = trace(database_url, first.id, max_messages=2)
    assert [it.topic for it in tree(cut.life)] == [
        "orders.placed",
        "payments.requested",
    ]
    assert (whole.is_cut, cut.is_cut) == (False, True)


def test_messages_that_name_each_other_as_their_cause_are_read_once(
    database_url: str,
) -> None:
    first = Message("a", b"")
    second = caused_by(first, "b")
    execute(
        database_url,
        "INSERT INTO outbox.message (id, lane, topic, content_type, payload, headers)"
        " VALUES (%s, 0, 'a', 'text/plain', '', jsonb_build_object('causation-id',"
        " %s::text))",
        (first.id, str(second.id)),
    )
    insert(database_url, second)

    found = trace(database_url, first.id)

    assert [it.topic for it in tree(found.life)] == ["a", "b"]
    assert [it.id for it in found.causes] == [str(second.id)]


def test_an_id_with_no_time_or_a_wrong_one_is_found_in_any_partition(
    database_url: str,
) -> None:
    random, of_another_year = (
        "8f14e45f-ceea-467f-9575-30a1c8b1d9a2",
        "01000000-0000-7000-8000-000000000000",
    )
    for id in (random, of_another_year):
        execute(
            database_url,
            "INSERT INTO outbox.message (id, lane, topic, content_type, payload)"
            " VALUES (%s, 0, 't', 'text/plain', '')",
            (id,),
        )
        found = trace(database_url, id)
        assert (id, found.found, found.life.topic) == (id, Found.FOUND, "t")


def test_an_id_that_was_used_twice_shows_both_messages(database_url: str) -> None:
    message = Message("t", b"")
    insert(database_url, message)
    insert(database_url, message)

    life = trace(database_url, message.id).life

    assert len(life.envelopes) == 2
    assert steps(life) == ["added", "added"]


def test_a_message_that_is_not_stored_is_not_found_or_not_knowable(
    database_url: str,
) -> None:
    assert trace(database_url, Message("t", b"").id).found is Found.NOT_FOUND
    before_the_first_day, after_9999 = (
        "01600000-0000-7000-8000-000000000000",
        "ffffffff-ffff-7fff-bfff-ffffffffffff",
    )
    for id in (before_the_first_day, after_9999):
        found = trace(database_url, id)
        assert (id, found.found) == (id, Found.NOT_KNOWABLE)
        assert any("outbox.message begins " in it for it in found.unknown), id


def test_a_receipt_and_a_dead_letter_outlive_their_messages(database_url: str) -> None:
    handled, refused = Message("t", b""), Message("t", b"")
    handle(database_url, handled)
    give_up(database_url, refused)

    found = trace(database_url, handled.id)
    assert (found.found, steps(found.life)) == (Found.FOUND, ["handled"])
    assert (found.life.state, found.life.envelopes) == (None, ())
    found = trace(database_url, refused.id)
    assert (found.found, steps(found.life)) == (Found.FOUND, ["dead_letter"])


def test_the_messages_of_a_key_are_found_whatever_their_priority(
    database_url: str,
) -> None:
    messages = [Message("t", b"", key="k", priority=priority) for priority in Priority]
    insert(database_url, *messages, Message("t", b"", key="other"))
    publish(database_url)
    since = datetime.now(UTC) - timedelta(days=1)

    with opened(database_url) as connection:
        lives = read_lives_of_key(
            {"shop": connection}, "k", since=since, max_messages=10
        ).lives
        newest = read_lives_of_key(
            {"shop": connection}, "k", since=since, max_messages=1
        ).lives

    assert {it.id for it in lives} == {str(it.id) for it in messages}
    assert all(it.state is State.PUBLISHED for it in lives)
    assert newest == lives[:1]


def test_the_views_show_the_same_steps_as_the_reader(database_url: str) -> None:
    message = Message("t", b"")
    insert(database_url, message)
    defer(database_url, "refused", attempts=1)
    publish(database_url)
    replay(database_url)
    handle(database_url, message, "shipping")
    give_up(database_url, message, schema="inbox")
    execute(database_url, "UPDATE inbox.dead_letter SET retry_count = 1")

    life = trace(database_url, message.id).life
    with psycopg.connect(as_role(database_url, "pillarbox_monitor")) as connection:
        connection.execute("SET jit = off")
        # Python never treats times in a repeated hour as equal across time zones.
        connection.execute("SET timezone = 'UTC'")
        rows = connection.execute(IN_VIEWS, {"id": message.id}).fetchall()

    told = [
        (it.at, it.what, it.source, it.due_at, it.by, it.reason) for it in life.steps
    ]
    assert len(told) == 7
    assert sorted(told, key=str) == sorted(rows, key=str)
