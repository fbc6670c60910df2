"""Make the screenshots of docs/web.md: `make screenshots`."""

import math
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import psycopg
import uvicorn
from playwright.sync_api import Browser, Page

from pillarbox import Message
from pillarbox.outbox.administration.migrate import migrate
from pillarbox.outbox.administration.upkeep import maintain
from pillarbox.outbox.observability.latency import LONG
from pillarbox.outbox.observability.measures.backlog import Backlog
from pillarbox.outbox.observability.overview import read_overview
from pillarbox.outbox.postgres.connection import conninfo
from pillarbox.outbox.testing.postgres import postgres_server
from pillarbox.outbox.web import Settings, TokenLogin, Viewer, web_app
from pillarbox.outbox.web.history import History
from tests.fixtures.chromium import chromium
from tests.fixtures.dead_letters import give_up
from tests.fixtures.positions import defer, publish
from tests.fixtures.presence import record_process
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute

HERE: Final = Path(__file__).parent
_TOKEN: Final = "a token for the screenshots"  # noqa: S105 (of a page that is gone)
_WIDE: Final = (1140, 720)
_NARROW: Final = (390, 844)
# The machine can be busy with tests.
_PATIENCE: Final = 300_000
_HELD_DAY: Final = """
    SELECT partman.create_partition_time('inbox.dead_letter',
        ARRAY[date_trunc('day', now(), 'UTC') - 40 * interval '24 hours'])
"""
_JOBS: Final = """
INSERT INTO inbox.job (message_id, message_at, consumer, topic, key, state, attempts,
                       worker, lease_until, queued_at, started_at)
SELECT m.id, inbox.moment_of(m.id), 'reports', 'reports.asked', key, 'in_progress', 1,
       worker, now() + lease, now() - age, now() - age
  FROM (VALUES
        (outbox.uuid7(), '2026-q2', 'reports-0:17', interval '60 s', interval '19 min'),
        (outbox.uuid7(), '2026-q3', 'reports-1:17', interval '-9 s', interval '2 h'))
       AS m (id, key, worker, lease, age)
"""
_ASKED: Final = """
INSERT INTO outbox.operation (kind, selection, reason, asked_by, asked_at, expected,
                              state, succeeded, failed, skipped, finished_at)
VALUES ('discard', '{"topic": "test.*"}', 'probes of Monday', 'ann',
        now() - interval '3 h', 12, 'done', 12, 0, 0, now() - interval '3 h'),
       ('retry', '{"origin": "relay:main"}', '', 'bob', now() - interval '1 h',
        3181, 'done', 3102, 77, 2, now() - interval '50 min'),
       ('retry', '{"topic": "orders.*"}', '', 'ann', now() - interval '20 min',
        40, 'stopped', 12, 0, 0, now() - interval '19 min')
"""
_HANDLED: Final = """
    INSERT INTO inbox.receipt (message_id, message_at, consumer)
    SELECT %s::uuid, inbox.moment_of(%s::uuid), %s
"""
_READER: Final = """
WITH reader AS (
    INSERT INTO outbox.reader (reader, broker) VALUES ('main', 'redis://broker/0')
)
INSERT INTO outbox.subscription (reader, topic, since, since_seq)
VALUES ('main', '*', '1:1:', -1)
"""
# An hour of messages at a varying rate, published at once and handled soon after.
_HOUR: Final = """
WITH moment AS (
    SELECT n, second, now() - second * interval '1 s' AS at
      FROM generate_series(1, 3600) AS second,
           generate_series(1, (3 + 2 * sin(second / 400.0)
                               + CASE WHEN second BETWEEN 900 AND 1300
                                      THEN 6 ELSE 0 END)::int) AS n
), message AS (
    INSERT INTO outbox.message (id, created_at, lane, topic, key, tenant, content_type,
                                payload)
    SELECT (lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0') || '7'
            || left(hash, 3) || '8' || substr(hash, 4, 15))::uuid, at,
           16 + get_byte(decode(hash, 'hex'), 9) % 16, 'orders.placed', 'c-' || n,
           'acme', 'application/json', '{}'
      FROM moment, LATERAL (SELECT md5(second || ' ' || n)) AS made (hash)
     ORDER BY at
    RETURNING id, created_at, seq, lane
), settled AS (
    INSERT INTO outbox.position (created_at, ends_at, settled_at, number, up_to,
                                 messages, lane, reader, snapshot)
    SELECT day, day + interval '24 hours', max(at) + interval '40 ms', max(seq),
           max(seq), count(*), lane, 'main',
           format('1:%s:', pg_current_xact_id()::text::bigint + 1)::pg_snapshot
      FROM (SELECT lane, seq, created_at AS at,
                   date_trunc('day', created_at, 'UTC') AS day
              FROM message) AS of_day
     GROUP BY day, lane, date_trunc('second', at)
)
INSERT INTO inbox.receipt (message_id, message_at, received_at, consumer)
SELECT id, inbox.moment_of(id), created_at + interval '60 ms', consumer
  FROM message, unnest(ARRAY['billing', 'mail']) AS consumer
 WHERE consumer = 'billing' OR get_byte(uuid_send(id), 15) < 60
"""
_TRACE: Final = """\
Traceback (most recent call last):
  File "/app/billing/handlers.py", line 41, in charge
    customer = customers[order["customer"]]
LookupError: no such customer
"""
_REASONS: Final = (
    ("inbox", "consumer:billing", "LookupError: no such customer", "orders.placed", 37),
    ("inbox", "consumer:mail", "TimeoutError: smtp.example", "customers.joined", 12),
    ("outbox", "relay:main", "MSG_SIZE_TOO_LARGE", "catalogue.changed", 5),
    ("outbox", "publisher:https", "HTTP 422: unknown currency", "orders.paid", 3),
)


def _seed(url: str) -> None:
    chance = random.Random(7)  # noqa: S311 (the same screenshots each time)
    for side, origin, reason, topic, count in _REASONS:
        for n in range(count):
            customer = f"c-{n % 7}"
            give_up(
                url,
                Message(
                    topic,
                    {"order": f"o-{1000 + n}", "customer": customer, "cents": 4200},
                    key=customer,
                    tenant=chance.choice(("acme", "globex")),
                    headers={"source": "shop"},
                ),
                schema="inbox" if side == "inbox" else "outbox",
                origin=origin,
                reason=reason,
                stacktrace=_TRACE,
                age=timedelta(minutes=chance.randrange(1, 4000)),
            )
    with psycopg.connect(conninfo(url), autocommit=True) as connection:
        maintain(connection, report=lambda _: None)
        for statement in (
            *("SET ROLE pillarbox_owner", _HELD_DAY, "RESET ROLE"),
            *(_READER, _JOBS, _ASKED, _HOUR),
        ):
            connection.execute(statement.encode())
    insert(url, Message("orders.paid", 1, key="c-3"), Message("orders.paid", 1))
    defer(url, "refused", attempts=3, reason="HTTP 503: down for maintenance")
    give_up(
        url,
        Message("orders.placed", 1),
        schema="inbox",
        reason="LookupError: no such customer",
        age=timedelta(days=40),
    )


def _add_family(url: str) -> str:
    """Add an order and the messages it causes; return the id of the order's message."""
    placed = Message(
        "orders.placed",
        {"order": "o-2041", "customer": "c-7", "cents": 4200},
        key="c-7",
        tenant="acme",
        headers={"source": "shop"},
    )
    payment, mail = (
        Message(topic, {"order": "o-2041"}, key="c-7", headers=_caused_by(placed))
        for topic in ("payments.requested", "mails.asked")
    )
    receipt = Message("receipts.asked", {}, headers=_caused_by(payment))
    insert(url, placed, payment, mail, receipt)
    defer(url, "refused", "topic = 'mails.asked'", attempts=2, reason="HTTP 503")
    publish(url, "topic NOT IN ('mails.asked', 'orders.paid')")
    for message, consumer in ((placed, "billing"), (placed, "mail"), (payment, "bank")):
        execute(url, _HANDLED, (message.id, message.id, consumer))
    return str(placed.id)


def _caused_by(message: Message) -> dict[str, str]:
    return {"causation-id": str(message.id)}


def _record_processes(url: str) -> None:
    """Record two relays and two consumers, as if they ran for the next hour."""
    for kind, name, host in (
        ("relay", "main", "relay-0 17"),
        ("relay", "main", "relay-1 17"),
        ("consumer", "billing", "billing-0 17"),
        ("consumer", "mail", "mail-0 17"),
    ):
        record_process(url, kind, name, host=host, silent=-timedelta(hours=1))


def _remember_an_hour(history: History, url: str) -> None:
    """Let the charts know an hour, as if the processes had counted in it."""
    with psycopg.connect(conninfo(url), autocommit=True) as connection:
        overview = read_overview(connection)
    processes = overview.processes
    assert processes is not None
    done, failed, buckets = 0, 0, [0] * (len(LONG) + 1)
    for minute in range(60, -1, -1):
        rush = 15 < minute < 22
        count = 200 + round(120 * math.sin(minute / 7)) + 400 * rush
        done, failed = done + count, failed + (minute % 9 == 0) * 7
        buckets[4 + rush] += count
        counters = {"orders.placed": [done, failed, list(buckets)]}
        kinds = {"relays": processes.relays, "consumers": processes.consumers}
        counted: Any = {
            name: tuple(replace(it, counters=counters) for it in found)
            for name, found in kinds.items()
        }
        at, backlog = overview.at - timedelta(minutes=minute), max(0, count - 300)
        history.add(
            replace(
                overview,
                at=at,
                processes=replace(processes, **counted),
                outbox=Backlog(messages=backlog, estimated=backlog),
            )
        )


@contextmanager
def _served(url: str) -> Iterator[str]:
    ann = Viewer(name="ann", may_act=True, may_pause=True, sees_payloads=True)
    settings = Settings(database=url)
    app = web_app(settings, TokenLogin({_TOKEN: ann}))
    _remember_an_hour(app.state.frame.history, url)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            threading.Event().wait(0.05)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def _open(browser: Browser, address: str, size: tuple[int, int], *, dark: bool) -> Page:
    page = browser.new_page(
        viewport={"width": size[0], "height": size[1]},
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
    )
    page.set_default_timeout(_PATIENCE)
    page.goto(f"{address}/login")
    page.get_by_label("Token").fill(_TOKEN)
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("heading", name="Overview").wait_for()
    return page


def _shoot(page: Page, name: str, *, whole: bool = False) -> None:
    status = page.locator("#status")
    if status.count():
        page.get_by_text("Live", exact=True).wait_for()
    page.screenshot(path=HERE / f"{name}.png", full_page=whole)


def main() -> None:
    """Make all screenshots again."""
    with ExitStack() as stack:
        server = stack.enter_context(postgres_server(None, settings={}, durable=False))
        server.create_database("screenshots")
        url = server.database_url("screenshots")
        migrate(url, with_cron=False)
        _seed(url)
        placed = _add_family(url)
        _record_processes(url)
        address = stack.enter_context(_served(url))
        browser = stack.enter_context(chromium())
        page = _open(browser, address, _WIDE, dark=False)
        for name in (
            "overview",
            "dead-letters",
            "blocked",
            "jobs",
            "partitions",
            "operations",
        ):
            page.goto(f"{address}/{name}")
            _shoot(page, name, whole=name == "overview")
        page.goto(f"{address}/dead-letters?side=inbox&origin=consumer:billing")
        page.get_by_role("button", name="Discard all that match").click()
        page.get_by_role("heading", name="Discard 38").wait_for()
        _shoot(page, "dry-run")
        page.goto(f"{address}/dead-letters")
        page.locator("a[id^='l-']").first.click()
        page.get_by_role("heading", name="Contents").wait_for()
        _shoot(page, "dead-letter")
        page.goto(f"{address}/messages")
        _shoot(page, "messages")
        page.goto(f"{address}/message?id={placed}")
        page.get_by_role("heading", name="Life").wait_for()
        _shoot(page, "message", whole=True)
        _shoot(_open(browser, address, _WIDE, dark=True), "dark")
        _shoot(_open(browser, address, _NARROW, dark=False), "phone")


if __name__ == "__main__":
    main()
