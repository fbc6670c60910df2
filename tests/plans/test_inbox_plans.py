"""The statements on deliveries use their index, and skip other tenants' floods."""

import re
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any, TypeAlias

import psycopg
import pytest
from typing_extensions import override

from inbox.sources.postgres.inbox_source import SESSION_SETTINGS
from outbox.postgres.sql_files import load
from outbox.testing.postgres import PostgresServer
from tests.fixtures.days import make_partitions_at
from tests.fixtures.deliveries import COVER, FROM_OLDEST
from tests.fixtures.postgres import Template, new_database
from tests.plans.conftest import Explained, Node, executed_plans, rows_read

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
       AND parent.relname ~ '^(message|position|deferral)_'
"""
FILL = """
    INSERT INTO inbox.message
           (message_id, created_at, lane, schema_version, topic, key, tenant,
            content_type, headers, payload)
    SELECT outbox.uuid7(), %(at)s + n * interval '1 second', n %% 16, 1, 't',
           'k' || n %% 500, %(tenant)s, 'text/plain', '{}', 'x'
      FROM generate_series(1, %(count)s) AS n
"""


class Deliveries(Explained):
    """A plan over the partitions of inbox.message and its followers."""

    @override
    def scans(self, *tables: str) -> list[Node]:
        return [
            node
            for node in self.nodes
            if re.match("(message|position|deferral)_p", node.get("Relation Name", ""))
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
        return rows_read(self.scans())


REFUSE = """
    INSERT INTO inbox.deferral (created_at, seq, lane, cause, consumer, key, attempts,
                                due_at)
    SELECT created_at, seq, lane, 'refused', 'billing', key, n, now()
      FROM inbox.message, generate_series(1, 3) AS n
     WHERE seq % 100 = 0
"""
ACKED = 22_000
"""All of the first day, and half of the flood."""

Explain: TypeAlias = Callable[..., Deliveries]


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
                make_partitions_at("inbox.message"),
                ([today - DAY, today - 2 * DAY],),
            )
            for at, count in ((today - DAY, 2_000), (today, 40_000)):
                flood = {"at": at, "tenant": "flood", "count": count}
                connection.execute(FILL, flood)
            connection.execute(FROM_OLDEST.format(consumer="'billing'", topic="'t'"))
            connection.execute(COVER.format(which="m.seq <= 22000"))
            connection.execute(REFUSE)
            if request.param:
                connection.execute("ANALYZE inbox.message")
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
        "starts": [ACKED] * len(LANES),
        "up_tos": [ACKED] * len(LANES),
        "snapshots": ["1000000000:1000000000:"] * len(LANES),
        "as_ofs": [None] * len(LANES),
        "part_lanes": [],
        "part_oldest": [],
        "part_newest": [],
        "part_starts": [],
        "part_up_tos": [],
        "part_snapshots": [],
        "hidden": [],
        "floors": [],
        "since": str(2**63 - 1),
        "floor": 2**63 - 1,
        "base": -1,
        "seqs": [],
        "moments": [],
        "oldest": today,
        "newest": today + DAY,
        "max_read": 10_000,
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
    # The sixth time, PostgreSQL can choose; a generic plan would show parameters.
    for _ in range(6):
        plan = explain("claim_deliveries", **claim(today))

        assert plan.sequential() == set()
        assert plan.partitions() == {today.strftime("%Y%m%d")}
        assert plan.indexes() == {"message_lane_idx"}
        assert not any("$" in said for said in plan.conditions())


@pytest.mark.parametrize("up_to", [ACKED, ACKED + 10])
@pytest.mark.parametrize("days", [1, 10_000])
def test_a_search_for_tenants_skips_the_flood(
    explain: Explain, today: datetime, up_to: int, days: int
) -> None:
    oldest = today - (days - 1) * DAY
    asked = look(today, up_tos=[up_to] * len(LANES), oldest=oldest)

    plan = explain("claim_tenants", **asked)

    assert plan.sequential() == set()
    assert days > 1 or plan.partitions() == {today.strftime("%Y%m%d")}
    assert plan.indexes() == {"message_tenant_idx"}
    assert plan.rows_read() <= FEW


def test_a_search_for_tenants_reads_only_its_share_of_an_unknown_flood(
    explain: Explain, today: datetime
) -> None:
    plan = explain("claim_tenants", **look(today, known=[]))

    assert plan.indexes() == {"message_tenant_idx"}
    assert plan.rows_read() <= 300


def test_a_claim_reads_no_acked_deliveries(explain: Explain, today: datetime) -> None:
    ahead = {"seqs": [ACKED + 1, ACKED + 17], "moments": [today, today]}
    plan = explain("claim_deliveries", **claim(today, **ahead))

    assert plan.rows_read() <= 260


def test_any_number_of_deliveries_ahead_is_looked_up_by_hash(
    explain: Explain, today: datetime
) -> None:
    seqs = list(range(ACKED, ACKED + 15_000))
    ahead = {"seqs": seqs, "moments": [today] * len(seqs)}
    plan = explain("claim_deliveries", **claim(today, **ahead))

    # Otherwise the array would be searched again for each row.
    subplans = [n for n in plan.nodes if n.get("Parent Relationship") == "SubPlan"]
    assert subplans
    assert all(node["Actual Loops"] <= 1 for node in subplans)


def test_waiting_deliveries_are_claimed_by_primary_key(
    explain: Explain, today: datetime
) -> None:
    plan = explain(
        "claim_waiting",
        base=-1,
        lanes=[4],
        keys=["k100"],
        aboves=[-1],
        seqs=[2_100, 2_200],
        moments=[today + 100 * SECOND, today + 200 * SECOND],
        max_rows_each=10,
        max_bytes=8_000_000,
    )

    assert plan.sequential() == set()
    assert plan.indexes() == {
        "deferral_key_idx",
        "deferral_delivery_idx",
        "message_pkey",
    }
    assert plan.rows_read() <= 1_000


def test_entries_ahead_of_the_positions_are_read_by_lane(
    explain: Explain,
) -> None:
    plan = explain("list_logged", lanes=LANES, up_tos=[ACKED - 1_000] * len(LANES))

    assert plan.sequential() == set()
    assert plan.indexes() <= {"deferral_pkey", "deferral_key_idx"}
