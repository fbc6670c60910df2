"""Row-level security between consumers, with the SQL of docs/database.md."""

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from inbox import Consumer
from inbox.cli.dead_letters import record_discard
from inbox.events import MessageHandled
from outbox import Message, uuid7
from outbox.cli.main import main
from outbox.dead_letters import Statement, statement
from outbox.postgres.connection import PIN_SESSION
from outbox.testing.postgres import PostgresServer
from relay.publisher import Acked
from relay.publishers.postgres import PostgresPublisher
from tests.fixtures.consumers import async_sessions_of, running
from tests.fixtures.dead_letters import give_up
from tests.fixtures.doctor import Doctor
from tests.fixtures.sessions import execute
from tests.outbox.administration.test_documented_sql import blocks, in_psql

LOGINS: Final = {
    "billing_app": "pillarbox_consumer",
    "shipping_app": "pillarbox_consumer",
    "newcomer_app": "pillarbox_consumer",
    "my_relay": "pillarbox_relay",
    "my_alarms": "pillarbox_monitor",
    "my_page": "pillarbox_web",
}
RECEIPT: Final = """
    INSERT INTO inbox.receipt (message_id, message_at, consumer)
    SELECT id, inbox.moment_of(id), %s FROM (SELECT %s::uuid AS id) AS m
"""
FOREIGN: Final = "INSERT INTO inbox.foreign_receipt VALUES ('stripe', 'evt_1', %s)"
SUBSCRIBE: Final = "INSERT INTO inbox.subscription VALUES (%s, 'orders')"
DEAD_LETTER: Final = """
    INSERT INTO inbox.dead_letter (origin, message_id, topic, attempts,
        schema_version, content_type, headers, payload, error_reason)
    VALUES ('consumer:' || %s, 'm', 't', 1, 1, 'text/plain', '{}', '', 'why')
"""

ACK: Final = """
    INSERT INTO inbox.ack (created_at, first_seq, last_seq, lane, consumer, seqs,
                           moments)
    VALUES (date_bin('15 minutes', now(), '2000-01-01Z'), 1, 1, 0, %s, '{1}',
            ARRAY[now()])
"""

JOB: Final = """
    INSERT INTO inbox.job (message_id, message_at, consumer, topic)
    SELECT id, inbox.moment_of(id), %s, 'reports' FROM (SELECT %s::uuid AS id) AS m
"""
WAIT: Final = """
    INSERT INTO inbox.redelivery (created_at, due_at, seq, attempts, lane, cause,
                                  consumer)
    SELECT created_at, now() + interval '1 hour', seq, 1, lane, 'refused', consumer
      FROM inbox.delivery
"""
UNSETTLED: Final = """
    SELECT u.consumer, u.cause
      FROM outbox.partitions('inbox.delivery') AS p
     CROSS JOIN LATERAL inbox.unsettled_deliveries(p.partition, p.starts_at, p.ends_at)
                     AS u
     ORDER BY 1
"""
GUESS: Final = """
    INSERT INTO inbox.redelivery (created_at, due_at, seq, lane, cause, consumer)
    VALUES (%s, CASE WHEN %s <> 'acked' THEN now() END, %s, %s, %s, 'shipping')
"""
GUESS_MARK: Final = """
    INSERT INTO inbox.ack (created_at, first_seq, last_seq, lane, consumer, seqs,
                           moments)
    SELECT date_bin('15 minutes', moment, '2000-01-01Z'), seq, seq, lane, 'shipping',
           ARRAY[seq], ARRAY[moment]
      FROM (VALUES (%s::timestamptz, %s::bigint, %s::smallint)) AS v (moment, seq, lane)
"""
MANY_GUESSES: Final = """
    INSERT INTO inbox.redelivery (created_at, due_at, seq, lane, cause, consumer)
    SELECT now(), now(), n, 0, 'refused', 'shipping' FROM generate_series(1, 2000) AS n
"""

As: TypeAlias = Callable[[str], str]


@pytest.fixture
def login(scheduled_server: PostgresServer) -> As:
    """A function from login role to URL, for a database with the page's policies."""
    url = scheduled_server.url
    for name, role in LOGINS.items():
        execute(url, f"CREATE ROLE {name} LOGIN")
        execute(url, f"GRANT {role} TO {name}")
    start = "### Consumers that must not trust each other"
    (script,) = blocks("database.md", start, "\n## ")
    done = in_psql(url, f"\\set ON_ERROR_STOP on\n{script}")
    assert (done.returncode, done.stderr) == (0, "")
    return lambda name: url.replace("postgres@", f"{name}@")


def count(url: str, table: str) -> int:
    ((rows,),) = execute(url, f"SELECT count(*) FROM {table}")
    return int(rows)


async def publish(login: As, *payloads: bytes) -> None:
    async with PostgresPublisher.from_url(login("my_relay")) as publisher:
        answers = await publisher.publish([Message("orders", p) for p in payloads])
    assert answers == [Acked()] * len(payloads)


async def test_both_consumers_work_and_see_only_their_own_deliveries(
    login: As,
) -> None:
    execute(login("shipping_app"), SUBSCRIBE, ("shipping",))
    handled: list[bytes] = []
    async with async_sessions_of(login("billing_app")) as sessions:
        billing = Consumer(login("billing_app"), sessions, name="billing")

        @billing.handles("orders")
        async def bill(session: AsyncSession, message: Message) -> None:
            handled.append(message.payload)

        async with running(billing) as events:
            await publish(login, b"1", b"2")
            await events.wait_for(MessageHandled, 2)
    assert sorted(handled) == [b"1", b"2"]

    shipping = login("shipping_app")
    unacked = "inbox.delivery_status WHERE acked_at IS NULL"
    assert count(shipping, unacked) == count(shipping, "inbox.delivery") == 2
    assert count(login("billing_app"), "inbox.receipt") == 2
    assert count(shipping, "inbox.receipt") == 0
    assert count(login("my_alarms"), "inbox.delivery") == 4
    assert count(login("my_alarms"), "inbox.receipt") == 2


async def test_a_consumer_cannot_read_ack_or_unsubscribe_another(
    login: As, scheduled_server: PostgresServer
) -> None:
    execute(login("billing_app"), SUBSCRIBE, ("billing",))
    await publish(login, b"secret")
    execute(login("billing_app"), DEAD_LETTER, ("billing",))

    for other in (login("shipping_app"), login("newcomer_app")):
        for table in ("ack", "redelivery", "watermark", "unsettled_delivery"):
            assert count(other, f"inbox.{table}") == 0
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            execute(other, ACK, ("billing",))
        execute(other, "DELETE FROM inbox.subscription")
        for table in (
            *("delivery", "subscription", "dead_letter", "readable_dead_letter"),
            *("job", "suspect", "receipt", "foreign_receipt"),
        ):
            assert count(other, f"inbox.{table}") == 0

    url = scheduled_server.url
    assert count(url, "inbox.delivery_status WHERE acked_at IS NULL") == 1
    assert count(url, "inbox.subscription") == 1
    assert count(login("billing_app"), "inbox.readable_dead_letter") == 1


@pytest.mark.parametrize("waits", [False, True], ids=["new", "given back"])
@pytest.mark.parametrize("cause", ["acked", "refused", "mark"])
async def test_a_consumer_cannot_settle_the_deliveries_of_another_that_it_guesses(
    login: As, scheduled_server: PostgresServer, cause: str, waits: bool
) -> None:
    url = scheduled_server.url
    for consumer in ("billing", "shipping"):
        execute(login(f"{consumer}_app"), SUBSCRIBE, (consumer,))
    await publish(login, b"1")
    if waits:
        execute(url, WAIT)
    before = execute(url, UNSETTLED)
    states = "SELECT consumer, state FROM inbox.delivery_status ORDER BY 1"
    shown = execute(url, states)
    left = "SELECT consumer, state FROM inbox.unsettled_delivery ORDER BY 1"
    unsettled = execute(url, left)

    ((moment, seq, lane),) = execute(
        url,
        "SELECT created_at, seq, lane FROM inbox.delivery WHERE consumer = 'billing'",
    )
    if cause == "mark":
        execute(login("shipping_app"), GUESS_MARK, (moment, seq, lane))
    else:
        guess = (moment, cause, seq, lane, cause)
        execute(login("shipping_app"), GUESS, guess)
        execute(login("shipping_app"), MANY_GUESSES)

    assert [consumer for consumer, _ in before] == ["billing", "shipping"]
    assert execute(url, UNSETTLED) == before
    assert execute(url, states) == shown
    assert execute(url, left) == unsettled
    assert execute(login("billing_app"), states) == shown[:1]


async def test_a_consumer_cannot_make_a_delivery_of_another_seem_unsettled(
    login: As, scheduled_server: PostgresServer
) -> None:
    url = scheduled_server.url
    execute(login("billing_app"), SUBSCRIBE, ("billing",))
    await publish(login, b"1")
    ((moment, seq, lane),) = execute(
        url, "SELECT created_at, seq, lane FROM inbox.delivery"
    )
    execute(url, GUESS_MARK.replace("shipping", "billing"), (moment, seq, lane))

    execute(login("shipping_app"), GUESS, (moment, "refused", seq, lane, "refused"))

    assert execute(url, UNSETTLED) == []
    assert execute(url, "SELECT state FROM inbox.delivery_status") == [("acked",)]
    assert count(url, "inbox.unsettled_delivery") == 0


async def test_the_views_show_a_consumer_only_its_own_jobs_and_waiting_deliveries(
    login: As, scheduled_server: PostgresServer
) -> None:
    execute(login("billing_app"), SUBSCRIBE, ("billing",))
    await publish(login, b"waits")
    execute(scheduled_server.url, WAIT)
    execute(login("billing_app"), JOB, ("billing", str(uuid7())))

    for view in ("job_status", "waiting_delivery"):
        assert count(login("billing_app"), f"inbox.{view}") == 1
        assert count(login("my_alarms"), f"inbox.{view}") == 1
        for other in ("shipping_app", "newcomer_app"):
            assert count(login(other), f"inbox.{view}") == 0


def test_the_page_discards_dead_letters_and_cancels_jobs_of_all_consumers(
    login: As, scheduled_server: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    message = Message("reports", b"")
    (letter,) = give_up(scheduled_server.url, message, schema="inbox")
    execute(login("billing_app"), JOB, ("billing", str(message.id)))
    page = login("my_page")

    assert main(["cancel", "--database", page, str(message.id)]) == 0
    with psycopg.connect(page, autocommit=True) as connection:
        ((created_at,),) = connection.execute(
            "SELECT created_at FROM inbox.dead_letter_status"
        )
        discard = {
            "id": letter,
            "created_at": created_at,
            "reason": "no longer needed",
            "person": "ann",
        }
        ((message_id, origin),) = connection.execute(
            statement("inbox", Statement.MARK_DISCARDED), discard
        )
        record_discard(connection, message_id, origin)

    assert "is cancelled" in capsys.readouterr().out
    assert execute(scheduled_server.url, "SELECT state FROM inbox.job") == [
        ("cancelled",)
    ]
    assert execute(scheduled_server.url, "SELECT status FROM inbox.dead_letter") == [
        ("DISCARDED",)
    ]
    assert count(scheduled_server.url, "inbox.receipt") == 1


@pytest.mark.parametrize(
    ("query", "more"),
    [(RECEIPT, (str(uuid7()),)), (FOREIGN, ()), (SUBSCRIBE, ()), (DEAD_LETTER, ())],
    ids=["receipt", "foreign receipt", "subscription", "dead letter"],
)
def test_a_consumer_cannot_write_on_behalf_of_another(
    login: As, query: str, more: tuple[Any, ...]
) -> None:
    execute(login("billing_app"), query, ("billing", *more))
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        execute(login("shipping_app"), query, ("billing", *more))
    with psycopg.connect(login("shipping_app"), autocommit=True) as connection:
        connection.execute("SET ROLE pillarbox_consumer")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute(query, ("billing", *more))


def test_the_upkeep_runs_with_the_policies(
    login: As, scheduled_server: PostgresServer
) -> None:
    execute(scheduled_server.url, "CALL outbox.maintain()")
    execute(scheduled_server.url, "SELECT outbox.trim_foreign_receipts_batch()")
    ((failed,),) = execute(
        scheduled_server.url,
        "SELECT count(*) FROM outbox.partition_health WHERE gaps > 0",
    )
    assert failed == 0


def test_the_doctor_accepts_the_policies_and_no_others(
    login: As, scheduled_server: PostgresServer, doctor: Doctor
) -> None:
    def found() -> list[str]:
        findings = doctor(scheduled_server.url)[1]
        return [f["finding"] for f in findings if f["check"] == "row security"]

    assert found() == []
    execute(scheduled_server.url, "DROP POLICY own_rows ON inbox.receipt")
    assert [finding.partition(" applies")[0] for finding in found()] == [
        "row-level security of inbox.receipt"
    ]
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        execute(login("billing_app"), f"{PIN_SESSION}; SELECT FROM inbox.receipt")
