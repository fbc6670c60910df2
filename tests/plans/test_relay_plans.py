"""The hot statements use their index and touch the partitions between the bounds."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

from outbox.testing.postgres import PostgresServer
from relay.relay import WORKER_SETTINGS
from tests.fixtures.postgres import Template, new_database
from tests.plans.conftest import DAYS_BACK, Explain, explaining

DAY = timedelta(days=1)
PARTITIONS = 80
LONG_LANE = 31
BACKLOG = """
    INSERT INTO outbox.message (id, created_at, lane, topic, key, content_type, payload)
    SELECT outbox.uuid7(), day + n * interval '1 millisecond',
           CASE WHEN n %% 2 = 0 THEN %(long_lane)s ELSE 16 + n / 2 %% 12 END,
           't', 'k' || n %% 100, 'text/plain', %(payload)s
      FROM generate_series(%(today)s - interval '24 hours', %(today)s,
                           interval '24 hours') AS day
     CROSS JOIN generate_series(1, 20000) AS n
"""


def day(moment: datetime) -> str:
    return moment.strftime("%Y%m%d")


def claim(oldest: datetime, newest: datetime, **changes: object) -> dict[str, Any]:
    return {
        "lanes": [*range(16, 32)],
        "floors": [-1] * 16,
        "oldest": oldest,
        "newest": newest,
        "blocked": [],
        "only": None,
        "max_rows": 500,
        "aside": [],
        "max_bytes": 8_000_000,
        "max_indexed": 2048,
        "max_tenant": 1024,
        "max_content_type": 1020,
        "max_headers": 262_144,
        "max_payload": 1_000_000,
        "max_copied": 1_000_000,
        **changes,
    }


@pytest.mark.parametrize("blocked", [[], [f"k{n}" for n in range(50)]])
def test_a_claim_reads_the_days_between_its_bounds_by_the_ready_index(
    explain: Explain, today: datetime, blocked: list[str]
) -> None:
    bounds = (today, today + DAY - timedelta(hours=1))

    plan = explain("claim_batch", **claim(*bounds, blocked=blocked))

    assert plan.sequential() == []
    assert plan.partitions() == {day(today)}
    assert plan.indexes() == {"message_ready_idx"}


@pytest.fixture(scope="module", params=["with statistics", "without statistics"])
def backlog_url(
    request: pytest.FixtureRequest,
    server: PostgresServer,
    template: Template,
    today: datetime,
) -> Iterator[str]:
    """Lanes of about a thousand ready rows, a long one, and months of partitions."""
    with new_database(server, "pillarbox_backlog_plans", template) as name:
        url = server.database_url(name)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SET timezone = 'UTC'")
            connection.execute("SET ROLE pillarbox_owner")
            connection.execute(
                "SELECT partman.create_partition_time('outbox.message', %s)",
                ([today - n * DAY for n in range(1, PARTITIONS)],),
            )
            connection.execute(
                BACKLOG, {"today": today, "payload": b"x" * 300, "long_lane": LONG_LANE}
            )
            if request.param == "with statistics":
                connection.execute("ANALYZE outbox.message")
        yield url


@pytest.mark.parametrize("lanes", [[*range(16, 28)], [16], [LONG_LANE]])
@pytest.mark.parametrize("days", [1, 2, PARTITIONS])
def test_a_worker_claims_a_backlog_in_the_order_of_the_index_without_sorting_a_lane(
    backlog_url: str, today: datetime, lanes: list[int], days: int
) -> None:
    bounds = (today - (days - 1) * DAY, today + DAY)
    asked: dict[str, Any] = {"lanes": lanes, "floors": [-1] * len(lanes)}

    with explaining(backlog_url, WORKER_SETTINGS) as explain:
        plan = explain("claim_batch", **claim(*bounds, **asked))

    assert plan.sorts() == []
    assert plan.sequential() == []
    assert plan.indexes() == {"message_ready_idx"}
    # Beside those of the batch, the first of each partition that has some.
    read = sum(node["Actual Rows"] * node["Actual Loops"] for node in plan.scans())
    assert read <= 500 + 2 * len(lanes)


@pytest.mark.parametrize("count", [1, 500])
def test_a_worker_settles_by_key_in_the_days_of_the_batch(
    backlog_url: str, today: datetime, count: int
) -> None:
    with psycopg.connect(backlog_url) as connection:
        rows = connection.execute(
            "SELECT id, created_at FROM outbox.message"
            " WHERE created_at >= %s ORDER BY seq LIMIT %s",
            (today, count),
        ).fetchall()
    moments = [moment for _, moment in rows]

    with explaining(backlog_url, WORKER_SETTINGS) as explain:
        plan = explain(
            "mark_published",
            ids=[id for id, _ in rows],
            first=min(moments),
            last=max(moments),
        )

    assert plan.sequential() == []
    assert plan.partitions() == {day(today)}
    assert plan.indexes() == {"message_pkey"}


def test_a_claim_that_is_not_bounded_still_uses_the_index(
    explain: Explain, today: datetime
) -> None:
    plan = explain(
        "claim_batch", **claim(datetime(2000, 1, 1, tzinfo=UTC), today + 30 * DAY)
    )

    assert plan.sequential() == []
    assert plan.indexes() == {"message_ready_idx"}


def test_a_claim_above_the_floor_reads_no_row_below_it(
    explain: Explain, today: datetime
) -> None:
    plan = explain("claim_batch", **claim(today, today + DAY, floors=[10**9] * 16))

    assert sum(node["Actual Rows"] for node in plan.scans()) == 0
    assert plan.rows_removed() == 0
    assert all("floor" in condition for condition in plan.conditions())


@pytest.mark.parametrize("name", ["mark_published", "schedule_retry"])
@pytest.mark.parametrize("count", [1, 500])
def test_settling_finds_the_rows_by_key_in_the_days_of_the_batch(
    explain: Explain, filled_url: str, today: datetime, name: str, count: int
) -> None:
    yesterday = today - DAY
    with psycopg.connect(filled_url) as connection:
        rows = connection.execute(
            "SELECT id, created_at FROM outbox.message"
            " WHERE created_at >= %s AND created_at < %s LIMIT %s",
            (yesterday, today, count),
        ).fetchall()
    ids: list[UUID] = [id for id, _ in rows]
    moments = [moment for _, moment in rows]
    nacked = {"delays": [1.0] * count, "reasons": ["no"] * count}
    more = (
        {}
        if name == "mark_published"
        else {**nacked, "attempts": [0] * count, "charge": 1}
    )

    plan = explain(name, ids=ids, first=min(moments), last=max(moments), **more)

    assert plan.sequential() == []
    assert plan.partitions() == {day(yesterday)}
    assert plan.indexes() == {"message_pkey"}


def test_due_messages_are_found_by_the_waiting_index(explain: Explain) -> None:
    plan = explain("ready_due", lanes=[*range(16, 32)], max_rows=500, max_total=1000)

    assert plan.sequential() == []
    assert plan.indexes() == {"message_waiting_idx", "message_pkey"}


def test_delayed_messages_do_not_slow_down_a_claim(explain: Explain) -> None:
    plan = explain("ready_due", lanes=[*range(16, 32)], max_rows=500, max_total=1000)

    assert any("available_at" in condition for condition in plan.conditions())
    assert plan.rows_removed() == 0


def test_blocked_keys_are_found_by_their_index(explain: Explain) -> None:
    plan = explain("list_blocked_keys", lanes=[*range(16, 32)], max_keys=101)

    assert plan.sequential() == []
    # A day with few rows that wait may be read by the index of those.
    assert "message_blocked_idx" in plan.indexes()


def test_the_heads_of_lanes_are_found_by_the_ready_index(explain: Explain) -> None:
    plan = explain("find_heads", lanes=[*range(16, 32)], blocked=["k1", "k2"])

    assert plan.sequential() == []
    assert plan.indexes() == {"message_ready_idx"}


def test_there_are_partitions_to_skip(filled_url: str) -> None:
    with psycopg.connect(filled_url) as connection:
        row = connection.execute(
            "SELECT count(DISTINCT created_at::date) FROM outbox.message"
        ).fetchone()
    assert row == (DAYS_BACK + 1,)


def test_refused_messages_are_found_by_their_index(explain: Explain) -> None:
    plan = explain("list_refused", max_rows=50)

    assert plan.sequential() == []
    assert "message_blocked_idx" in plan.indexes()


WHICH = dict.fromkeys(("topic", "topic_prefix", "key", "tenant"))


@pytest.mark.parametrize("name", ["find_published", "count_published"])
@pytest.mark.parametrize("topic", [None, "t"])
def test_a_replay_reads_only_the_requested_days(
    explain: Explain, today: datetime, name: str, topic: str | None
) -> None:
    bounds = {"since": today - 2 * DAY + timedelta(hours=1), "until": today}
    more = {"max_rows": None} if name == "find_published" else {}

    plan = explain(name, **{**WHICH, "topic": topic}, **bounds, **more)

    assert plan.partitions() == {day(today - 2 * DAY), day(today - DAY)}


@pytest.mark.parametrize("count", [1, 1000])
def test_a_batch_of_a_replay_is_found_by_primary_key_in_its_partitions(
    explain: Explain, filled_url: str, today: datetime, count: int
) -> None:
    with psycopg.connect(filled_url) as connection:
        rows = connection.execute(
            "SELECT id, created_at FROM outbox.message"
            " WHERE created_at >= %s AND created_at < %s"
            " AND published_at IS NOT NULL ORDER BY seq LIMIT %s",
            (today - DAY, today, count),
        ).fetchall()
    moments = [moment for _, moment in rows]

    plan = explain(
        "replay_published",
        ids=[id for id, _ in rows],
        first=min(moments),
        last=max(moments),
    )

    assert plan.sequential() == []
    assert plan.partitions() == {day(today - DAY)}
    assert plan.indexes() == {"message_pkey"}


CROWDED: dict[str, Any] = {
    "lanes": [*range(16, 32)],
    "floors": [-1] * 16,
    "returning": ["k1", "k2"],
    "aside": [],
    "max_examined": 625,
    "max_rows": 500,
}


def days_of(today: datetime) -> dict[str, Any]:
    return {
        "oldest": today,
        "newest": today + DAY - timedelta(hours=1),
        "refused_since": today,
    }


def test_a_congested_lane_is_examined_row_by_row_and_heads_are_found_by_their_index(
    explain: Explain, today: datetime
) -> None:
    plan = explain("find_unblocked", **CROWDED, **days_of(today))

    assert plan.sequential() == []
    assert plan.partitions() == {day(today)}
    assert plan.indexes() == {"message_ready_idx", "message_blocked_idx"}


def test_keys_that_catch_up_are_found_among_what_was_passed(
    explain: Explain, today: datetime
) -> None:
    plan = explain(
        "find_returning",
        **{**CROWDED, "floors": [10**9] * 16},
        **days_of(today),
        positions=[-1] * 16,
        readied=[5],
    )

    assert plan.sequential() == []
    assert plan.partitions() == {day(today)}
    assert "message_ready_idx" in plan.indexes()


def test_the_reach_of_a_look_is_read_from_the_ready_index(
    explain: Explain, today: datetime
) -> None:
    plan = explain(
        "find_reach",
        lanes=[*range(16, 32)],
        starts=[-1] * 16,
        ends=[10**9] * 16,
        oldest=today,
        newest=today + DAY - timedelta(hours=1),
        max_examined=625,
    )

    assert plan.sequential() == []
    assert plan.indexes() == {"message_ready_idx"}


def test_the_first_refusal_is_found_without_reading_them_all(explain: Explain) -> None:
    plan = explain("find_first_refusal", lanes=[*range(16, 32)], max_days=40)

    assert plan.sequential() == []
    assert all(node["Actual Rows"] <= 1 for node in plan.scans())
