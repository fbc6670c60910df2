"""How soon the page is painted and updated with a million messages."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from statistics import median

import psycopg
from playwright.sync_api import Page

from benchmarks.conditions import Conditions, show
from benchmarks.history import Day, days_of, fill_messages, fill_receipts
from benchmarks.measure import Answer, at_most
from pillarbox.outbox.errors import OutboxError
from tests.fixtures.chromium import chromium
from tests.fixtures.web import served

TOKEN = "a-token-for-the-benchmark"
FIRST_PAINT_MS = 300
UPDATE_MS = 100
PAGES = (
    "overview",
    "dead-letters",
    "messages",
    "blocked",
    "jobs",
    "partitions",
    "operations",
)
WAITING = timedelta(minutes=2)
DEAD_LETTERS = """
INSERT INTO {schema}.dead_letter
       (created_at, origin, message_id, topic, key, tenant, attempts, schema_version,
        content_type, headers, payload, error_reason)
SELECT now() - n * interval '7 days' / %(rows)s, 'consumer:c' || n %% 4,
       gen_random_uuid()::text, 'topic.' || n %% 20, 'k' || n %% 1000,
       'tenant' || n %% 10, 3, 1, 'application/json', '{{}}', '{{}}',
       'Error' || n %% 40 || ': something is wrong with a long reason'
  FROM generate_series(1, %(rows)s) AS n
"""
# Refused messages, each of which blocks its key.
REFUSED = """
INSERT INTO outbox.deferral
       (created_at, id, seq, lane, attempts, cause, due_at, key, reason)
SELECT created_at, id, seq, lane, 1, 'refused', now() + interval '1 hour',
       key || id, 'HTTP 503'
  FROM outbox.unsettled_message LIMIT 1000
"""
# From the start of a navigation to the first contentful paint.
PAINTED = """
() => new Promise((done) => new PerformanceObserver((list) => {
  const found = list.getEntriesByName("first-contentful-paint");
  if (found.length) done(found[0].startTime);
}).observe({type: "paint", buffered: true}))
"""
# As page.js does.
UPDATE = """
async () => {
  const started = performance.now();
  const answer = await fetch(location.href, {headers: {accept: "text/html"}});
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const live = document.getElementById("live");
  live.replaceChildren(...page.getElementById("live").childNodes);
  live.getBoundingClientRect();
  return performance.now() - started;
}
"""


def answers(conditions: Conditions) -> Iterator[Answer]:
    messages = conditions.size(1_000_000, quick=50_000)
    letters = conditions.size(100_000, quick=10_000)
    with conditions.migrated_database() as url:
        fill(url, messages, letters)
        with serving(url) as address, chromium() as browser:
            page = browser.new_page()
            log_in(page, address)
            for name in PAGES:
                painted, updated = watch(page, f"{address}/{name}", conditions.runs(9))
                show(name, painted, "ms to the first paint")
                show(name, updated, "ms for an update")
                detail = f"{messages:,} messages, {letters:,} dead letters of each side"
                yield Answer(
                    question=f"web: {name}, first paint",
                    figure=painted,
                    target=at_most(FIRST_PAINT_MS),
                    unit="ms",
                    detail=detail,
                )
                yield Answer(
                    question=f"web: {name}, update",
                    figure=updated,
                    target=at_most(UPDATE_MS),
                    unit="ms",
                    detail=detail,
                )


def fill(url: str, messages: int, letters: int) -> None:
    """Add a day of messages, of which the latest still wait, and dead letters."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET timezone = 'UTC'")
        today = days_of(connection, "outbox.message")[0]
        fill_messages(
            connection,
            Day(today.partition, today.begin, today.end - WAITING),
            messages - messages // 100,
        )
        fill_messages(
            connection,
            Day(today.partition, today.end - WAITING, today.end),
            messages // 100,
            settled=False,
        )
        connection.execute(REFUSED)
        receipts = days_of(connection, "inbox.receipt")[0]
        fill_receipts(connection, receipts, messages)
        for schema in ("outbox", "inbox"):
            insert = DEAD_LETTERS.format(schema=schema)
            connection.execute(insert.encode(), {"rows": letters})
        connection.execute("VACUUM ANALYZE")


@contextmanager
def serving(url: str) -> Iterator[str]:
    """Serve the page for the block."""
    with tempfile.TemporaryDirectory(prefix="pillarbox-web-") as folder:
        tokens = Path(folder, "tokens")
        tokens.write_text(f"ann {TOKEN} act payloads\n")
        log = Path(folder, "log")
        with served(url, log, "--tokens", str(tokens)) as (process, address):
            yield address
            if not process.is_running():
                raise OutboxError(process.log())


def log_in(page: Page, address: str) -> None:
    page.goto(f"{address}/login")
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(re.compile("(?<!login)$"))


def watch(page: Page, address: str, runs: int) -> tuple[float, float]:
    """Return the milliseconds of the first paint and of an update."""
    painted, updated = [], []
    for _ in range(runs):
        page.goto(address)
        painted.append(float(page.evaluate(PAINTED)))
        updated.append(float(page.evaluate(UPDATE)))
    return median(painted), median(updated)
