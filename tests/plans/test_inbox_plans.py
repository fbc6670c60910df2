"""The statements on deliveries use their index, and skip other tenants' floods."""

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

import psycopg
import pytest
from typing_extensions import override

from inbox.sources.postgres.source import SESSION_SETTINGS
from outbox.postgres.sql_files import load
from outbox.testing.postgres import PostgresServer
from tests.fixtures.days import make_partitions_at
from tests.fixtures.postgres import Template, new_database
from tests.plans.conftest import Explained, Node, executed_plans

DAY = timedelta(days=1)
SECOND = timedelta(seconds=1)
LANES = list(range(16))
# A plan shows the rows of a scan as a rounded mean over its loops.
FEW = 60
PARENTS = """
    SELECT child.relname, parent.relname
      FROM pg_inherits JOIN pg_class child ON child.oid = inhrelid
      JOIN pg_class parent ON parent.oid = inhparent
     WHERE child.relkind = 'i' AND parent.relnamespace = 'inbox'::regnamespace
       AND parent.relname ~ '^(delivery|ack|redelivery|watermark)_'
"""
FILL = """
    INSERT INTO inbox.delivery
           (message_id, created_at, lane, schema_version, consumer, topic, key, tenant,
            content_type, headers, payload)
    SELECT outbox.uuid7(), %(at)s + n * interval '1 second', n %% 16, 1, 'billing', 't',
           'k' || n %% 500, %(tenant)s, 'text/plain', '{}', 'x'
      FROM generate_series(1, %(count)s) AS n
"""


class Deliveries(Explained):
    """A plan over the partitions of inbox.delivery."""

    @override
    def scans(self, *tables: str) -> list[Node]:
        return [
            node
            for node in self.nodes
            if re.match(
                "(delivery|ack|redelivery|watermark)_p", node.get("Relation Name", "")
            )
            and "Scan" in node["Node Type"]
        ]

    @override
    def indexes(self) -> set[str]:
        """Return the indexes that were read, without scans that never ran."""
        return {
            self._parents[node["Index Name"]]
            for node in self.scans()
            if node["Actual Loops"] > 0 and node.get("Index Name") in self._parents
        }

    def rows_read(self) -> int:
        """Return the number of rows fetched from partitions, even if filtered out."""
        read = 0
        for node in self.scans():
            removed = node.get("Rows Removed by Filter", 0)
            read += int((node["Actual Rows"] + removed) * node["Actual Loops"])
        return read


ACK = """
    INSERT INTO inbox.ack (created_at, consumer, lane, first_seq, last_seq, seqs,
                           moments)
    SELECT date_bin('15 minutes', created_at, '2000-01-01Z') AS bin, consumer, lane,
           min(seq), max(seq), array_agg(seq ORDER BY seq),
           array_agg(created_at ORDER BY seq)
      FROM inbox.delivery
     WHERE seq <= %(acked)s
     GROUP BY bin, consumer, lane, seq / 500
"""
REFUSE = """
    INSERT INTO inbox.redelivery (created_at, seq, lane, cause, consumer, key, attempts,
                                  due_at)
    SELECT created_at, seq, lane, 'refused', consumer, key, n, now()
      FROM inbox.delivery, generate_series(1, 3) AS n
     WHERE seq % 100 = 0
"""
ACKED = 22_000
"""All of the first day, and half of the flood."""

Explain: TypeAlias = Callable[..., Deliveries]


@pytest.fixture(scope="module")
def today() -> datetime:
    return datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)


@pytest.fixture(scope="module", params=[True, False], ids=["analyzed", "never read"])
def flooded_url(
    request: pytest.FixtureRequest,
    server: PostgresServer,
    template: Template,
    today: datetime,
) -> Iterator[str]:
    """A flood of one tenant, then five rows of each of two others after ANALYZE."""
    with new_database(server, "pillarbox_inbox_plans", template) as name:
        url = server.database_url(name)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SET timezone = 'UTC'")
            connection.execute("SET ROLE pillarbox_owner")
            connection.execute(
                make_partitions_at("inbox.delivery"),
                ([today - DAY, today - 2 * DAY],),
            )
            for at, count in ((today - DAY, 2_000), (today, 40_000)):
                flood = {"at": at, "tenant": "flood", "count": count}
                connection.execute(FILL, flood)
            connection.execute(ACK, {"acked": ACKED})
            connection.execute(REFUSE)
            if request.param:
                connection.execute("ANALYZE inbox.delivery")
            for tenant in ("a tenant before", "some tenant behind"):
                few = {"at": today, "tenant": tenant, "count": 5}
                connection.execute(FILL, few)
        yield url


@pytest.fixture
def explain(flooded_url: str) -> Iterator[Explain]:
    """Explain one of the consumer's statements, executed as by the source."""
    with psycopg.connect(flooded_url) as connection:
        parents: dict[str, str] = dict(connection.execute(PARENTS).fetchall())
    with executed_plans(flooded_url, "pillarbox_consumer", SESSION_SETTINGS) as execute:

        def run(name: str, **parameters: object) -> Deliveries:
            asked = {"consumer": "billing", **parameters}
            return Deliveries(execute(load("inbox", name), asked), parents)

        yield run


def claim(today: datetime, **changes: object) -> dict[str, Any]:
    return {
        "lanes": LANES,
        "floors": [ACKED] * len(LANES),
        "passed": [],
        "oldest": today,
        "newest": today + DAY,
        "max_rows": 256,
        "max_bytes": 8_000_000,
        **changes,
    }


def look(today: datetime, **changes: object) -> dict[str, Any]:
    more = {"known": ["flood"], "after": "", "max_steps": 64, "max_rows_each": 16}
    return claim(today, **(more | changes))


def test_a_claim_reads_the_days_between_its_bounds_by_the_lane_index(
    explain: Explain, today: datetime
) -> None:
    plan = explain("claim_deliveries", **claim(today))

    assert plan.sequential() == []
    assert plan.partitions() == {today.strftime("%Y%m%d")}
    assert plan.indexes() == {"delivery_lane_idx"}


def test_no_plan_of_the_source_is_generic(explain: Explain, today: datetime) -> None:
    # The sixth time, PostgreSQL can choose; a generic plan would show parameters.
    plans = [explain("claim_deliveries", **claim(today)) for _ in range(6)]

    assert not any("$" in said for plan in plans for said in plan.conditions())
    assert {index for plan in plans for index in plan.indexes()} == {
        "delivery_lane_idx"
    }


@pytest.mark.parametrize("floor", [ACKED, ACKED + 10])
def test_a_search_for_tenants_skips_the_flood(
    explain: Explain, today: datetime, floor: int
) -> None:
    plan = explain("claim_tenants", **look(today, floors=[floor] * len(LANES)))

    assert plan.sequential() == []
    assert plan.partitions() == {today.strftime("%Y%m%d")}
    assert plan.indexes() == {"delivery_tenant_idx"}
    assert plan.rows_read() <= FEW


def test_a_search_for_tenants_reads_only_its_share_of_an_unknown_flood(
    explain: Explain, today: datetime
) -> None:
    plan = explain("claim_tenants", **look(today, known=[]))

    assert plan.indexes() == {"delivery_tenant_idx"}
    assert plan.rows_read() <= 300


def test_a_search_of_all_partitions_still_skips_the_flood(
    explain: Explain, today: datetime
) -> None:
    beginning = datetime(2000, 1, 1, tzinfo=UTC)
    plan = explain("claim_tenants", **look(today, oldest=beginning))

    assert plan.sequential() == []
    assert plan.indexes() == {"delivery_tenant_idx"}
    assert plan.rows_read() <= FEW


def test_a_claim_reads_no_acked_deliveries(explain: Explain, today: datetime) -> None:
    plan = explain("claim_deliveries", **claim(today, passed=[ACKED + 1, ACKED + 17]))

    assert plan.rows_read() <= 260


def test_any_number_of_passed_deliveries_is_looked_up_by_hash(
    explain: Explain, today: datetime
) -> None:
    passed = list(range(ACKED, ACKED + 15_000))
    plan = explain("claim_deliveries", **claim(today, passed=passed))

    filters = [str(node.get("Filter", "")) for node in plan.scans()]
    assert any("hashed SubPlan" in said for said in filters)


def test_waiting_deliveries_are_claimed_by_primary_key(
    explain: Explain, today: datetime
) -> None:
    plan = explain(
        "claim_waiting",
        lanes=[4],
        keys=["k100"],
        aboves=[-1],
        seqs=[2_100, 2_200],
        moments=[today + 100 * SECOND, today + 200 * SECOND],
        attempts=[1, 1],
        max_rows_each=10,
        max_bytes=8_000_000,
    )

    assert plan.sequential() == []
    assert plan.indexes() == {
        "redelivery_key_idx",
        "redelivery_delivery_idx",
        "ack_lane_idx",
        "delivery_pkey",
    }
    assert plan.rows_read() <= 1_000


def test_the_heads_are_read_by_watermark_and_lane_index(
    explain: Explain,
) -> None:
    plan = explain("find_heads", lanes=LANES, cluster="here")

    assert plan.sequential() == []
    assert plan.indexes() == {"watermark_pkey", "delivery_lane_idx"}
    assert plan.rows_read() <= 2 * len(LANES)


def test_a_stretch_is_verified_with_one_hash_table_of_its_marks(
    explain: Explain, today: datetime
) -> None:
    plan = explain(
        "verify_stretch",
        lane=3,
        starts_at=today,
        ends_at=today + DAY,
        above=-1,
        up_to=ACKED,
        max_open=1,
    )

    assert plan.sequential() == []
    assert plan.partitions() == {today.strftime("%Y%m%d")}
    assert plan.indexes() <= {"delivery_lane_idx", "ack_lane_idx", "redelivery_pkey"}
    # Each delivery and each mark is read only once.
    assert plan.rows_read() <= 3_000


def test_covered_deliveries_are_read_above_the_floors(
    explain: Explain, today: datetime
) -> None:
    plan = explain(
        "list_covered",
        lanes=LANES,
        floors=[ACKED - 1_000] * len(LANES),
        oldest=today,
    )

    assert plan.sequential() == []
    assert plan.indexes() <= {"ack_lane_idx", "redelivery_pkey"}
