"""The statements on deliveries use their index, and none walks another's flood."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

import psycopg
import pytest
from typing_extensions import override

from inbox.sources.postgres.source import SESSION_SETTINGS
from outbox.postgres.sql_files import load
from outbox.testing.postgres import PostgresServer
from tests.fixtures.postgres import Template, new_database
from tests.plans.conftest import Explained, Node, executed_plans

DAY = timedelta(days=1)
LANES = list(range(16))
# The rows of a scan are told as a rounded mean over its loops.
FEW = 60
PARENTS = """
    SELECT child.relname, parent.relname
      FROM pg_inherits JOIN pg_class child ON child.oid = inhrelid
      JOIN pg_class parent ON parent.oid = inhparent
     WHERE child.relkind = 'i' AND parent.relnamespace = 'inbox'::regnamespace
       AND parent.relname LIKE 'delivery%'
"""
FILL = """
    INSERT INTO inbox.delivery
           (message_id, created_at, lane, schema_version, consumer, topic, key, tenant,
            content_type, headers, payload, acked_at)
    SELECT outbox.uuid7(), %(at)s + n * interval '1 second', n %% 16, 1, 'billing', 't',
           'k' || n %% 500, %(tenant)s, 'text/plain', '{}', 'x',
           CASE WHEN n <= %(acked)s THEN now() END
      FROM generate_series(1, %(count)s) AS n
"""


class Deliveries(Explained):
    """A plan over the partitions of inbox.delivery."""

    @override
    def scans(self) -> list[Node]:
        return [
            node
            for node in self.nodes
            if str(node.get("Relation Name", "")).startswith("delivery_p")
            and "Scan" in node["Node Type"]
        ]

    def rows_read(self) -> int:
        """Rows that were fetched from partitions, whatever became of them."""
        read = 0
        for node in self.scans():
            removed = node.get("Rows Removed by Filter", 0)
            read += int((node["Actual Rows"] + removed) * node["Actual Loops"])
        return read


Explain: TypeAlias = Callable[..., Deliveries]


@pytest.fixture(scope="module")
def today() -> datetime:
    return datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)


@pytest.fixture(scope="module")
def flooded_url(
    server: PostgresServer, template: Template, today: datetime
) -> Iterator[str]:
    """A flood of one tenant, known to the planner; then five rows of another."""
    with new_database(server, "pillarbox_inbox_plans", template) as name:
        url = server.database_url(name)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SET timezone = 'UTC'")
            connection.execute("SET ROLE pillarbox_owner")
            connection.execute(
                "SELECT partman.create_partition_time('inbox.delivery', %s)",
                ([today - DAY, today - 2 * DAY],),
            )
            for at, count in ((today - DAY, 2_000), (today, 40_000)):
                flood = {"at": at, "tenant": "flood", "count": count, "acked": 20_000}
                connection.execute(FILL, flood)
            connection.execute("ANALYZE inbox.delivery")
            for tenant in ("a tenant before", "some tenant behind"):
                few = {"at": today, "tenant": tenant, "count": 5, "acked": 0}
                connection.execute(FILL, few)
        yield url


@pytest.fixture
def explain(flooded_url: str) -> Iterator[Explain]:
    """Explain one of the consumer's statements, executed as the source does."""
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
        "floors": [-1] * len(LANES),
        "held": [],
        "blocked": [],
        "oldest": today,
        "newest": today + DAY,
        "max_rows": 256,
        "max_bytes": 8_000_000,
        **changes,
    }


def look(today: datetime, **changes: object) -> dict[str, Any]:
    more = {"known": ["flood"], "after": "", "max_steps": 64, "max_rows_each": 16}
    return claim(today, **(more | changes))


def test_a_claim_reads_the_days_between_its_bounds_by_the_ready_index(
    explain: Explain, today: datetime
) -> None:
    plan = explain("claim_deliveries", **claim(today))

    assert plan.sequential() == []
    assert plan.partitions() == {today.strftime("%Y%m%d")}
    assert plan.indexes() == {"delivery_ready_idx"}


def test_no_plan_of_the_source_is_generic(explain: Explain, today: datetime) -> None:
    # The sixth time PostgreSQL may choose; a generic one would have parameters.
    plans = [explain("claim_deliveries", **claim(today)) for _ in range(6)]

    assert not any("$" in said for plan in plans for said in plan.conditions())
    assert {index for plan in plans for index in plan.indexes()} == {
        "delivery_ready_idx"
    }


@pytest.mark.parametrize("floor", [-1, 10])
def test_a_look_for_tenants_skips_the_flood(
    explain: Explain, today: datetime, floor: int
) -> None:
    plan = explain("claim_tenants", **look(today, floors=[floor] * len(LANES)))

    assert plan.sequential() == []
    assert plan.partitions() == {today.strftime("%Y%m%d")}
    assert plan.indexes() == {"delivery_tenant_idx"}
    assert plan.rows_read() <= FEW


def test_a_look_reads_no_more_than_its_share_of_an_unknown_flood(
    explain: Explain, today: datetime
) -> None:
    plan = explain("claim_tenants", **look(today, known=[], blocked=["k1", "k2"]))

    assert plan.indexes() == {"delivery_tenant_idx"}
    assert plan.rows_read() <= 300


def test_a_look_over_all_partitions_still_skips_the_flood(
    explain: Explain, today: datetime
) -> None:
    beginning = datetime(2000, 1, 1, tzinfo=UTC)
    plan = explain("claim_tenants", **look(today, oldest=beginning))

    assert plan.sequential() == []
    assert plan.indexes() == {"delivery_tenant_idx"}
    assert plan.rows_read() <= FEW
