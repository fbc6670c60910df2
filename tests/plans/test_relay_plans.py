"""The hot statements use their index and touch only partitions within their bounds."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from outbox.testing.postgres import PostgresServer
from relay.relay import WORKER_SETTINGS
from tests.fixtures.postgres import Template, new_database
from tests.plans.conftest import DAYS_BACK, Explain, Explained, explaining

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


CLAIMS = {"message_lane_idx", "settlement_lane_idx"}


def test_a_claim_reads_the_days_between_its_bounds_by_the_lane_indexes(
    explain: Explain, today: datetime
) -> None:
    bounds = (today, today + DAY - timedelta(hours=1))

    plan = explain("claim_batch", **claim(*bounds))

    assert plan.sequential() == []
    assert plan.partitions("message", "settlement") == {day(today)}
    assert plan.indexes() == CLAIMS


def hashed(plan: Explained) -> list[str]:
    """Return the filters that search a list of marks by hash."""
    return [
        node["Filter"]
        for node in plan.nodes
        if "hashed SubPlan" in str(node.get("Filter"))
    ]


def test_marks_are_searched_by_hash_with_any_statistics(
    explain: Explain, backlog_url: str, today: datetime
) -> None:
    bounds = (today - DAY, today + DAY)
    assert hashed(explain("claim_batch", **claim(*bounds)))
    with explaining(backlog_url, WORKER_SETTINGS) as without_statistics:
        plan = without_statistics("claim_batch", **claim(*bounds))
        assert hashed(plan)
        (marks,) = (
            node
            for node in plan.nodes
            if str(node.get("Subplan Name")).startswith("InitPlan")
        )
        assert marks["Actual Loops"] == 1


@pytest.fixture
def explain(filled_url: str) -> Iterator[Explain]:
    """Explain with the settings of all of a relay's connections."""
    with explaining(filled_url, WORKER_SETTINGS) as run:
        yield run


@pytest.fixture(scope="module", params=["with statistics", "without statistics"])
def backlog_url(
    request: pytest.FixtureRequest,
    server: PostgresServer,
    template: Template,
    today: datetime,
) -> Iterator[str]:
    """Lanes with about a thousand ready rows, a long one, and months of partitions."""
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
def test_a_worker_claims_a_backlog_in_index_order_without_sorting(
    backlog_url: str, today: datetime, lanes: list[int], days: int
) -> None:
    bounds = (today - (days - 1) * DAY, today + DAY)
    asked: dict[str, Any] = {"lanes": lanes, "floors": [-1] * len(lanes)}

    with explaining(backlog_url, WORKER_SETTINGS) as explain:
        plan = explain("claim_batch", **claim(*bounds, **asked))

    assert plan.sorts() == []
    assert plan.sequential() == []
    assert plan.indexes() == CLAIMS
    # The rows of the batch, plus the first row of each partition that has rows.
    read = sum(node["Actual Rows"] * node["Actual Loops"] for node in plan.scans())
    assert read <= 500 + 2 * len(lanes)


def test_an_unbounded_claim_still_uses_the_indexes(
    explain: Explain, today: datetime
) -> None:
    plan = explain(
        "claim_batch", **claim(datetime(2000, 1, 1, tzinfo=UTC), today + 30 * DAY)
    )

    assert plan.sequential() == []
    assert plan.indexes() == CLAIMS


def test_a_claim_above_the_floor_reads_no_row_below_it(
    explain: Explain, today: datetime
) -> None:
    plan = explain("claim_batch", **claim(today, today + DAY, floors=[10**9] * 16))

    scans = plan.scans("message", "settlement")
    assert sum(node["Actual Rows"] for node in scans) == 0
    assert plan.rows_removed() == 0
    assert all("floor" in condition for condition in plan.conditions())


def read_log(plan: Explained) -> int:
    """Return the number of log entries that were read."""
    return sum(
        node["Actual Rows"] * node["Actual Loops"] for node in plan.scans("deferral")
    )


LANES = [*range(16, 32)]


def test_due_messages_are_found_by_due_time(explain: Explain, today: datetime) -> None:
    plan = explain(
        "find_due",
        lanes=LANES,
        moments=[today - 30 * DAY] * 16,
        entries=[-1] * 16,
        since=today - 30 * DAY,
        max_rows=50,
    )

    assert plan.sequential() == []
    assert plan.indexes() == {"deferral_due_idx", "deferral_message_idx"}
    assert plan.partitions() == set()
    # A sort would read all messages that are due at the same time.
    assert plan.sorts() == []


def test_a_scan_for_due_messages_rereads_nothing(
    explain: Explain, today: datetime
) -> None:
    plan = explain(
        "find_due",
        lanes=LANES,
        moments=[datetime.now(UTC) + timedelta(seconds=30)] * 16,
        entries=[-1] * 16,
        since=today - 30 * DAY,
        max_rows=50,
    )

    assert plan.sequential() == []
    assert read_log(plan) == 0


def test_the_messages_of_keys_are_found_in_the_log_by_key(
    explain: Explain, today: datetime
) -> None:
    plan = explain(
        "find_next_of_keys",
        lanes=[17] * 4,
        keys=["k1", "k17", "k33", "k49"],
        seqs=[-1] * 4,
        since=today - DAY,
        max_rows=250,
    )

    assert plan.sequential() == []
    assert plan.indexes() == {"deferral_key_idx", "deferral_message_idx"}
    assert min(plan.partitions("deferral")) == day(today - DAY)


def test_messages_that_waited_are_loaded_by_primary_key(
    explain: Explain, filled_url: str, today: datetime
) -> None:
    with psycopg.connect(filled_url) as connection:
        rows = connection.execute(
            "SELECT id, created_at, lane::integer, seq, run, entry FROM outbox.deferral"
            " WHERE created_at >= %s AND created_at < %s ORDER BY entry LIMIT 100",
            (today - DAY, today),
        ).fetchall()
    ids, created_ats, lanes, seqs, runs, entries = map(list, zip(*rows, strict=True))
    bounds = claim(today, today)
    for name in ("lanes", "floors", "oldest", "newest", "max_rows", "aside"):
        del bounds[name]

    plan = explain(
        "claim_deferred",
        ids=ids,
        created_ats=created_ats,
        lanes=lanes,
        seqs=seqs,
        runs=runs,
        entries=entries,
        first=min(created_ats),
        last=max(created_ats),
        **bounds,
    )

    assert plan.sequential() == []
    assert plan.partitions("message", "deferral", "settlement") == {day(today - DAY)}
    assert plan.indexes() == {
        "message_pkey",
        "deferral_message_idx",
        "settlement_lane_idx",
    }


def test_reading_the_log_resumes_after_the_last_entry_read(explain: Explain) -> None:
    plan = explain("read_deferrals", lanes=LANES, entries=[10**9] * 16, max_rows=100)

    assert plan.sequential() == []
    assert plan.indexes() == {"deferral_pkey"}
    assert read_log(plan) == 0


def test_a_new_owner_reads_the_log_in_portions_by_the_entry(explain: Explain) -> None:
    plan = explain("read_deferrals", lanes=LANES, entries=[-1] * 16, max_rows=10)

    assert plan.sequential() == []
    assert plan.indexes() == {"deferral_pkey"}
    # The merge of the partitions reads the first entry of each.
    assert read_log(plan) <= len(LANES) * (10 + len(plan.scans("deferral")))


def test_blocked_keys_are_found_by_the_key(explain: Explain) -> None:
    plan = explain(
        "find_waiting_keys", lanes=[16, 17, 18], keys=["key 1", "key 2", "no such key"]
    )

    assert plan.sequential() == []
    assert plan.indexes() <= {"deferral_key_idx", "deferral_message_idx"}
    assert "deferral_key_idx" in plan.indexes()


def test_the_first_message_without_a_mark_is_found_by_the_lane_indexes(
    explain: Explain,
) -> None:
    plan = explain("find_unmarked", lanes=LANES, aboves=[-1] * 16, up_tos=[2**18] * 16)

    assert plan.sequential() == []
    assert plan.indexes() == CLAIMS


def test_marks_are_verified_by_the_lane_indexes(explain: Explain) -> None:
    plan = explain(
        "verify_marks",
        lanes=LANES,
        aboves=[1000] * 48,
        up_tos=[1500] * 48,
        above=1000,
        up_to=1500,
    )

    assert plan.sequential() == []
    assert plan.indexes() == CLAIMS
    read = sum(
        node["Actual Rows"] * node["Actual Loops"] for node in plan.scans("message")
    )
    assert read <= 2 * 500 + len(plan.scans()) * len(LANES)


def test_without_statistics_marks_are_verified_by_hash_and_by_index(
    backlog_url: str,
) -> None:
    with explaining(backlog_url, WORKER_SETTINGS) as explain:
        plan = explain(
            "verify_marks",
            lanes=LANES,
            aboves=[10_000] * 48,
            up_tos=[14_000] * 48,
            above=10_000,
            up_to=14_000,
        )

    assert plan.sequential() == []
    assert plan.indexes() == CLAIMS


def test_a_stretch_is_checked_in_its_partition(
    explain: Explain, today: datetime
) -> None:
    stretch = {
        "lane": 17,
        "starts_at": today - DAY,
        "ends_at": today,
        "up_to": 10**6,
    }
    plan = explain("check_stretch", **stretch)
    assert plan.sequential() == []
    assert plan.partitions() == {day(today - DAY)}

    plan = explain("find_passed_by", **stretch, max_indexed=2048, max_rows=100)
    assert plan.sequential() == []
    assert plan.partitions("message", "settlement") == {day(today - DAY)}


def test_watermarks_are_read_by_lane(explain: Explain) -> None:
    plan = explain("read_watermarks", lanes=LANES, drawn=10**9)

    assert plan.sequential() == []


def test_there_are_partitions_to_skip(filled_url: str) -> None:
    with psycopg.connect(filled_url) as connection:
        row = connection.execute(
            "SELECT count(DISTINCT created_at::date) FROM outbox.message"
        ).fetchone()
    assert row == (DAYS_BACK + 1,)
