"""Custom headers can't pose as attributes: reserved names are refused.

`add` and SQL refuse them; rows inserted by hand are dead-lettered.
"""

from collections import Counter

import psycopg
import pytest
from sqlalchemy.orm import Session

import pillarbox
from pillarbox import Message, insert_statement, uuid7
from pillarbox.outbox.dead_letters.criteria import Criteria
from pillarbox.outbox.dead_letters.retry import retry_all
from pillarbox.outbox.errors import InvalidMessageError
from pillarbox.outbox.lane import Priority, lane_of
from pillarbox.outbox.limits import STORED_HEADERS, reserved_header
from pillarbox.relay.dead_letters.retry import PublishingRetrier
from pillarbox.relay.events import MessageDeadLettered
from tests.fixtures.dead_letters import find, give_up, states
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import dead_letters, insert, running
from tests.fixtures.sessions import execute

RESERVED = [
    *("ce-tenant", "ce_tenant", "CE-Type", "Ce_Id", "ce-anything"),
    *("cloudEvents:tenant", "cloudevents:id", "cloudEvents_type", "CLOUDEVENTS:x"),
    *("pillarbox-codec", "Pillarbox-Headers", "pillarbox-topic"),
    *("webhook-id", "Webhook-Signature", "Nats-Msg-Id", "nats-rollup"),
    *("content-type", "Content-Type"),
]
FREE = [
    *("ce", "cement", "ceremony-id", "cloudevents", "cloudeventſ:tenant", "x-ce-id"),
    *("pillarbox", "webhook", "content-type-of-body", "content-types", "nats"),
    *("traceparent", "tracestate", "causation-id", "authorization", "h:x"),
]


@pytest.mark.parametrize("name", RESERVED)
def test_a_reserved_name_is_refused_when_it_is_added(name: str) -> None:
    session = Session()
    message = Message("t", b"", headers={"x": "1", name: "forged"})

    with pytest.raises(InvalidMessageError, match="is a reserved name") as it:
        pillarbox.add(session, message)
    with pytest.raises(InvalidMessageError, match="is a reserved name"):
        insert_statement(message)

    assert (it.value.field, it.value.value) == ("headers", name)
    assert not session.new


def test_other_names_are_free_but_not_a_codecs() -> None:
    for name in FREE:
        insert_statement(Message("t", b"", headers={name: "1"}))
    assert all(reserved_header([name]) for name in STORED_HEADERS)


ADD = (
    "SELECT outbox.add('t', '\\x'::bytea, headers => jsonb_build_object(%s::text, 'x'))"
)


def insert_by_hand(url: str, name: str) -> None:
    id = uuid7()
    execute(
        url,
        "INSERT INTO outbox.message (id, lane, schema_version, topic, content_type,"
        " headers, payload) VALUES (%s, %s, 1, %s, 'a/b',"
        " jsonb_build_object(%s::text, 'forged'), '')",
        [id, lane_of(None, id, Priority.DEFAULT), f"by hand: {name}", name],
    )


def test_sql_and_python_refuse_the_same_names(database_url: str) -> None:
    for name in RESERVED:
        with pytest.raises(psycopg.errors.InvalidParameterValue) as it:
            execute(database_url, ADD, [name])
        assert f"headers has the reserved name '{name}'" in str(it.value)
    for name in FREE:
        execute(database_url, ADD, [name])

    (kept,) = execute(database_url, "SELECT count(*) FROM outbox.message")
    assert kept == (len(FREE),)


async def test_a_row_inserted_by_hand_reaches_no_broker_with_a_forged_attribute(
    database_url: str,
) -> None:
    forged = [name for name in RESERVED if name not in STORED_HEADERS]
    for name in forged:
        insert_by_hand(database_url, name)
    insert(database_url, Message("good", b"", headers={"x": "1"}))
    publisher = ScriptedPublisher()

    async with running(database_url, publisher) as relay:
        await relay.events.wait_for(MessageDeadLettered, len(forged))
        await publisher.until_acked(1)

    assert {message.topic for call in publisher.calls for message in call} == {"good"}
    found = dead_letters(database_url)
    assert sorted(topic for topic, _, _ in found) == sorted(
        f"by hand: {name}" for name in forged
    )
    assert all("is a reserved name" in reason for _, _, reason in found)


async def test_a_dead_letter_with_a_reserved_name_is_not_published_by_a_retry(
    database_url: str,
) -> None:
    give_up(database_url, Message("t", b"", headers={"ce-tenant": "forged"}))
    publisher = ScriptedPublisher()

    async with PublishingRetrier(database_url, lambda: publisher) as retrier:
        found = await find(retrier, Criteria())
        assert await retry_all(retrier, found) == Counter(failed=1)

    assert publisher.calls == []
    ((_, _, reason),) = states(database_url)
    assert "'ce-tenant': is a reserved name" in reason
