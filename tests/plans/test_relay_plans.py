"""The hot statements use their index and touch only partitions within their bounds."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

import psycopg
import pytest

from pillarbox import Message
from pillarbox.outbox.administration.connection import administration
from pillarbox.outbox.administration.readers import add_reader
from pillarbox.outbox.administration.tenants import add_tenant_index
from pillarbox.outbox.log.position import Snapshot
from pillarbox.outbox.log.process import SETTINGS as READER_SETTINGS
from pillarbox.outbox.log.takeover import xids_of
from pillarbox.outbox.postgres.sql_files import load
from pillarbox.outbox.testing.postgres import PostgresServer
from pillarbox.relay.publishers.postgres import SETTINGS, rows
from tests.fixtures.days import make_partitions_at
from tests.fixtures.postgres import Template, new_database
from tests.fixtures.variants import as_variant
from tests.plans.conftest import (
    DAYS_BACK,
    Explain,
    Explained,
    days_of,
    executed_plans,
    executed_scans,
    explaining,
    read_sequentially,
    record_plans,
    rows_read,
    walk,
)

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


BEYOND = 2**63 - 1
LIMITS = {
    "max_bytes": 8_000_000,
    "max_payload": 1_000_000,
}
PARTS = ("lanes", "oldest", "newest", "starts", "up_tos", "snapshots")


def claim(
    oldest: datetime,
    newest: datetime,
    lanes: Sequence[int] = range(16, 32),
    start: int = -1,
    up_to: int = -1,
    snapshot: str = "1:1:",
    **changes: object,
) -> dict[str, Any]:
    """Return the parameters of a claim of lanes with one part each."""
    return {
        "lanes": list(lanes),
        "starts": [start] * len(lanes),
        "up_tos": [up_to] * len(lanes),
        "snapshots": [snapshot] * len(lanes),
        "as_ofs": [None] * len(lanes),
        **{f"part_{name}": [] for name in PARTS},
        "hidden": [],
        "floors": [],
        "since": str(BEYOND),
        "floor": BEYOND,
        "base": -1,
        "oldest": oldest,
        "newest": newest,
        "max_read": 2500,
        "max_rows": 500,
        "gets_all": True,
        **LIMITS,
        **changes,
    }


def several(first: datetime, days: int, lanes: Sequence[int]) -> dict[str, Any]:
    """Return the parameters of a claim of lanes with a part for each day."""
    parts = [(lane, first + n * DAY) for lane in lanes for n in range(days)]
    return claim(first, first + days * DAY, lanes) | {
        "up_tos": [None] * len(lanes),
        "part_lanes": [lane for lane, _ in parts],
        "part_oldest": [begin for _, begin in parts],
        "part_newest": [begin + DAY for _, begin in parts],
        "part_starts": [-1] * len(parts),
        "part_up_tos": [-1] * len(parts),
        "part_snapshots": ["1:1:"] * len(parts),
    }


def rows_of(plan: Explained, *tables: str) -> int:
    return sum(
        round(node["Actual Rows"] * node["Actual Loops"])
        for node in plan.scans(*tables)
    )


def test_a_claim_reads_the_days_between_its_bounds_by_the_lane_index(
    explain: Explain, today: datetime
) -> None:
    bounds = (today, today + DAY - timedelta(hours=1))

    plan = explain("claim_batch", **claim(*bounds))

    assert plan.sequential() == set()
    assert plan.partitions("message", "position") == {day(today)}
    assert plan.indexes() == {"message_lane_idx"}

    without_bounds = claim(datetime(2000, 1, 1, tzinfo=UTC), today + 30 * DAY)
    plan = explain("claim_batch", **without_bounds)
    assert plan.sequential() == set()
    assert plan.indexes() == {"message_lane_idx"}


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
@pytest.mark.parametrize("days", [1, PARTITIONS])
@pytest.mark.parametrize("has_parts", [False, True], ids=["one part", "parts"])
def test_a_worker_claims_a_backlog_in_index_order_without_sorting(
    backlog_url: str, today: datetime, lanes: list[int], days: int, has_parts: bool
) -> None:
    first = today - (days - 1) * DAY
    asked = claim(first, today + DAY, lanes)
    if has_parts:
        asked = several(first, days, lanes)

    with explaining(backlog_url) as explain:
        plan = explain("claim_batch", **asked)

    assert plan.sorts() == []
    assert plan.sequential() == set()
    assert plan.indexes() == {"message_lane_idx"}
    # The rows of the batch, plus the first row of each partition that has rows.
    assert rows_of(plan) <= 500 + 2 * len(lanes)


def test_a_claim_reads_a_bounded_number_of_others_messages_and_returns_one_a_lane(
    backlog_url: str, today: datetime
) -> None:
    lanes = [*range(16, 28)]
    asked = claim(today, today + DAY, lanes, gets_all=False, max_read=50)
    with administration(backlog_url, application_name="test") as connection:
        for number in range(50):
            add_reader(connection, f"r{number}", ["x", "y.*"], broker="redis://b")

    with explaining(backlog_url) as explain:
        plan = explain("claim_batch", reader="r7", **asked)

    assert plan.sorts() == []
    assert plan.indexes() == {"message_lane_idx"}
    assert rows_of(plan) <= (50 + 1) * len(lanes)
    assert plan.nodes[0]["Actual Rows"] == len(lanes)


TENANTS = """
    INSERT INTO outbox.message (id, created_at, lane, topic, key, tenant, content_type, payload)
    SELECT outbox.uuid7(), day + n * interval '1 millisecond', 16 + n %% 16, 't', 'k' || n,
           CASE WHEN n <= 20000 THEN 'flood' ELSE 'tenant ' || n %% 100 END, 'text/plain', ''
      FROM generate_series(%(today)s - interval '24 hours', %(today)s, interval '24 hours') AS day
     CROSS JOIN generate_series(1, 20300) AS n
"""  # noqa: E501


@pytest.fixture(scope="module", params=["with statistics", "without statistics"])
def tenants_url(
    request: pytest.FixtureRequest,
    server: PostgresServer,
    template: Template,
    today: datetime,
) -> Iterator[str]:
    """A flood of one tenant, a few messages of a hundred, and months of partitions."""
    with new_database(server, "pillarbox_tenant_plans", template) as name:
        url = server.database_url(name)
        with administration(url, application_name="test") as connection:
            connection.execute("SET timezone = 'UTC'")
            connection.execute("SET ROLE pillarbox_owner")
            connection.execute(
                "SELECT partman.create_partition_time('outbox.message', %s)",
                ([today - n * DAY for n in range(1, PARTITIONS)],),
            )
            add_tenant_index(connection)
            connection.execute(TENANTS.encode(), {"today": today})
            if request.param == "with statistics":
                connection.execute("ANALYZE outbox.message")
        yield url


@pytest.mark.parametrize("days", [2, PARTITIONS])
@pytest.mark.parametrize("known", [["flood"], []], ids=["known", "unknown"])
def test_a_search_for_tenants_reads_little_of_a_flood(
    tenants_url: str, today: datetime, days: int, known: list[str]
) -> None:
    lanes = [*range(16, 32)]
    # All rows up to the tops were visible when they were claimed.
    asked = claim(today - (days - 1) * DAY, today + DAY, lanes, up_to=1000, start=990)
    asked |= {"snapshots": [f"{2**31}:{2**31}:"] * len(lanes)}

    with explaining(tenants_url) as explain:
        plan = explain(
            "claim_tenants",
            "inbox",
            **asked,
            tops=[1000] * len(lanes),
            known=known,
            after="",
            seqs=[],
            moments=[],
            searched="{}",
            max_steps=64,
            max_rows_each=16,
        )

    assert plan.sequential() == set()
    assert plan.indexes() == {
        "message_tenant_idx",
        "message_lane_idx",
        "deferral_message_idx",
    }
    assert plan.nodes[0]["Actual Rows"] > 100
    assert rows_of(plan) <= 3000


def test_a_claim_at_the_position_reads_no_row_below_it(
    explain: Explain, today: datetime
) -> None:
    asked = claim(today, today + DAY, start=10**9, up_to=10**9)

    plan = explain("claim_batch", **asked)

    assert rows_of(plan, "message", "position") == 0
    assert plan.rows_removed() == 0
    assert all("start" in condition for condition in plan.conditions())


def test_a_claim_below_the_position_reads_only_from_the_floor_of_what_has_ended(
    explain: Explain, filled_url: str, today: datetime
) -> None:
    with psycopg.connect(filled_url) as connection:
        ((last, snapshot),) = connection.execute(
            "SELECT max(seq), pg_current_snapshot()::text FROM outbox.message"
        ).fetchall()
    asked = claim(today, today + DAY, start=last, up_to=last, snapshot=snapshot)

    plan = explain("claim_batch", **asked | {"hidden": ["3"], "floors": [last - 100]})

    assert rows_of(plan) == 0
    # Of each lane, which are read one after the other.
    assert plan.rows_removed() <= 100 / 16 + 1


LANES = [*range(16, 32)]


def test_due_messages_are_found_by_due_time_and_none_twice(
    explain: Explain, today: datetime
) -> None:
    def find_due(after: datetime) -> Explained:
        return explain(
            "find_due",
            lanes=LANES,
            moments=[after] * 16,
            entries=[-1] * 16,
            since=today - 30 * DAY,
            within=timedelta(seconds=1),
            max_rows=50,
        )

    plan = find_due(today - 30 * DAY)

    assert plan.sequential() == set()
    assert plan.indexes() == {"deferral_due_idx", "deferral_message_idx"}
    assert plan.partitions() == set()
    # A sort would read all messages that are due at the same time.
    assert plan.sorts() == []

    plan = find_due(datetime.now(UTC) + timedelta(seconds=30))
    assert plan.sequential() == set()
    assert rows_of(plan, "deferral") == 0


def test_cancellations_of_due_messages_are_found_by_message_in_their_own_days(
    filled_url: str, today: datetime
) -> None:
    with psycopg.connect(filled_url, autocommit=True) as connection:
        due = connection.execute(
            "SELECT id, created_at FROM outbox.deferral WHERE cause = 'scheduled'"
            " AND created_at >= %s AND created_at < %s LIMIT 100",
            (today - DAY, today),
        ).fetchall()
        plans = record_plans(connection)
        connection.execute("SET auto_explain.log_nested_statements = on")
        connection.execute("SET ROLE pillarbox_relay")
        for name, value in READER_SETTINGS.items():
            connection.execute("SELECT set_config(%s, %s, false)", (name, value))
        plans.clear()
        ids, created_ats = zip(*due, strict=True)
        connection.execute(
            load("outbox.log", "find_cancelled"),
            {"ids": list(ids), "created_ats": list(created_ats)},
        )
        connection.execute("SELECT")
    nodes = [node for plan in plans for node in walk(plan["Plan"])]
    scans = executed_scans(nodes, "deferral")

    assert len(scans) == len(due) == 100
    assert read_sequentially(scans) == set()
    assert days_of(scans) == {day(today - DAY)}
    assert rows_read(scans) <= 2 * len(due)


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

    assert plan.sequential() == set()
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
        **LIMITS,
    )

    assert plan.sequential() == set()
    assert plan.partitions("message", "deferral", "position") == {day(today - DAY)}
    assert plan.indexes() == {"message_pkey", "deferral_message_idx"}


@pytest.mark.parametrize("begins", [True, False], ids=["a new owner", "a resumption"])
def test_the_log_is_read_in_portions_by_the_entry(
    explain: Explain, begins: bool
) -> None:
    entry = -1 if begins else 10**9

    plan = explain("read_deferrals", lanes=LANES, entries=[entry] * 16, max_rows=10)

    assert plan.sequential() == set()
    assert plan.indexes() == {"deferral_pkey"}
    # The merge of the partitions reads the first entry of each.
    most = len(LANES) * (10 + len(plan.scans("deferral"))) if begins else 0
    assert rows_of(plan, "deferral") <= most


def test_blocked_keys_are_found_by_the_key(explain: Explain) -> None:
    plan = explain(
        "find_waiting_keys", lanes=[16, 17, 18], keys=["key 1", "key 2", "no such key"]
    )

    assert plan.sequential() == set()
    assert plan.indexes() <= {"deferral_key_idx", "deferral_message_idx"}
    assert "deferral_key_idx" in plan.indexes()


def test_a_takeover_reads_one_position_and_one_row_of_each_lane_and_day(
    explain: Explain, today: datetime
) -> None:
    plan = explain(
        "take_over",
        "outbox.log",
        reader="main",
        lanes=LANES,
        since=-1,
        oldest=today,
        newest=today + DAY,
    )

    assert plan.sequential() == set()
    assert plan.indexes() <= {"position_pkey", "message_lane_idx"}
    assert rows_of(plan, "message", "position") <= 2 * len(LANES) * (DAYS_BACK + 1)


def late(url: str, oldest: datetime, newest: datetime) -> dict[str, Any]:
    """Return the parameters of a search for late rows, of which there are none."""
    with psycopg.connect(url) as connection:
        ((snapshot,),) = connection.execute(
            "SELECT pg_current_snapshot()::text"
        ).fetchall()
    return {
        "lanes": LANES,
        "up_tos": [10**9] * 16,
        "snapshots": [snapshot] * 16,
        "late_up_tos": [None] * 16,
        "late_snapshots": [None] * 16,
        "base": -1,
        "oldest": oldest,
        "newest": newest,
        **xids_of([Snapshot.parse(snapshot)]),
    }


def test_late_rows_are_found_by_their_transactions(
    explain: Explain, filled_url: str, today: datetime
) -> None:
    plan = explain("find_late", "outbox.log", **late(filled_url, today - DAY, today))

    assert plan.sequential() == set()
    assert plan.indexes() == {"message_xid_idx"}
    assert plan.partitions() == {day(today - DAY)}
    # What the index has not summarized yet is read.
    removed = sum(int(n.get("Rows Removed by Index Recheck", 0)) for n in plan.scans())
    assert removed < 6_000


def test_late_rows_of_lanes_that_have_few_are_found_in_the_lanes(
    explain: Explain, filled_url: str, today: datetime
) -> None:
    asked = late(filled_url, today - DAY, today)
    del asked["xids"], asked["xid_from"]

    plan = explain("find_late_in_lanes", "outbox.log", **asked)

    assert plan.sequential() == set()
    assert plan.indexes() == {"message_lane_idx"}


class Case(NamedTuple):
    """A database: its number of days and readers, and whether it has statistics."""

    days: int
    readers: int
    is_analyzed: bool


WAITING = 400
NEW = 160
# The first reader gets all that there is. The others got it, too, and have settled it.
ADD_READERS = """
    WITH reader AS (
        INSERT INTO outbox.reader (reader)
        SELECT 'reader-' || n FROM generate_series(1, %(readers)s) AS n RETURNING reader
    )
    INSERT INTO outbox.subscription (reader, topic)
    SELECT reader, CASE reader WHEN 'reader-1' THEN 't' ELSE reader || '.*' END
      FROM reader
"""
ADD = """
    INSERT INTO outbox.message (id, created_at, lane, topic, key, content_type, payload)
    SELECT outbox.uuid7(), %(begin)s + n * interval '1 second', 16 + n %% 16, 't',
           'k' || n %% 100, 'text/plain', %(payload)s
      FROM generate_series(1, %(rows)s) AS n
"""
SETTLE = """
    INSERT INTO outbox.position (created_at, ends_at, number, up_to, messages, lane,
                                 reader, snapshot)
    SELECT day, day + interval '24 hours', max(seq), max(seq), count(*), lane, r.reader,
           pg_current_snapshot()
      FROM (SELECT date_trunc('day', created_at, 'UTC') AS day, lane, seq
              FROM outbox.message) AS m,
           (SELECT reader FROM outbox.reader WHERE reader <> 'main') AS r
     GROUP BY day, lane, seq / 2000, r.reader
"""
# Those of today still wait for the first reader.
LOG = """
    INSERT INTO outbox.deferral
           (created_at, due_at, seq, id, lane, cause, outcome, key, reader)
    SELECT m.created_at, CASE e.cause WHEN 'open' THEN m.created_at END, m.seq, m.id,
           m.lane, e.cause, CASE e.cause WHEN 'settled' THEN 'published' END, m.key,
           r.reader
      FROM outbox.message AS m
     CROSS JOIN outbox.reader AS r
     CROSS JOIN (VALUES ('open'), ('settled')) AS e (cause)
     WHERE r.reader <> 'main' AND (m.created_at >= %(today)s OR m.seq %% 50 = 0)
       AND (e.cause = 'open' OR r.reader <> 'reader-1' OR m.created_at < %(today)s)
"""


@pytest.fixture(
    scope="module",
    params=[Case(2, 1, True), as_variant(Case(90, 50, False)), Case(90, 50, True)],
    ids=str,
)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture(scope="module")
def readers_url(
    case: Case, server: PostgresServer, template: Template, today: datetime
) -> Iterator[str]:
    """Days of settled messages; of those of today, some wait and others are new."""
    with new_database(server, "pillarbox_claim_plans", template) as name:
        url = server.database_url(name)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SET timezone = 'UTC'")
            days = [today - n * DAY for n in range(1, case.days)]
            connection.execute("SET ROLE pillarbox_owner")
            connection.execute(make_partitions_at("outbox.message"), (days,))
            connection.execute("RESET ROLE")
            connection.execute("SELECT nextval('outbox.message_seq')")
            connection.execute(ADD_READERS, {"readers": case.readers})

            def add(begin: datetime, rows: int) -> None:
                values = {"begin": begin, "rows": rows, "payload": b"x" * 300}
                connection.execute(ADD, values)

            for number, moment in enumerate(reversed(days)):
                add(moment, 20_000 if number == len(days) - 1 else 480)
            add(today, WAITING)
            connection.execute(SETTLE)
            connection.execute(LOG, {"today": today})
            add(today, NEW)
            if case.is_analyzed:
                connection.execute(
                    "ANALYZE outbox.message, outbox.position, outbox.deferral"
                )
        yield url


@pytest.fixture
def explain_reader(readers_url: str) -> Iterator[Explain]:
    with explaining(readers_url) as run:
        yield partial(run, reader="reader-1")


def waiting_of(url: str, today: datetime) -> list[tuple[Any, ...]]:
    """Return what waits for the first reader."""
    with psycopg.connect(url) as connection:
        return connection.execute(
            "SELECT id, created_at, lane::integer, seq, run, entry FROM outbox.deferral"
            " WHERE created_at >= %s AND reader = 'reader-1' ORDER BY entry LIMIT 100",
            (today,),
        ).fetchall()


def test_a_claim_reads_new_messages_only_however_many_days_and_readers_there_are(
    explain_reader: Explain, readers_url: str, today: datetime
) -> None:
    with psycopg.connect(readers_url) as connection:
        positions = connection.execute(
            "SELECT lane::integer, max(up_to) FROM outbox.position"
            " WHERE reader = 'reader-1' GROUP BY lane ORDER BY lane"
        ).fetchall()
    lanes, up_tos = ([*column] for column in zip(*positions, strict=True))
    asked = claim(today, today + DAY, lanes, gets_all=False)

    plan = explain_reader("claim_batch", **asked | {"starts": up_tos, "up_tos": up_tos})

    assert plan.nodes[0]["Actual Rows"] == NEW
    assert plan.sequential() == set()
    assert plan.indexes() == {"message_lane_idx"}
    assert plan.partitions("message", "position") == {day(today)}
    assert rows_of(plan) == NEW


def test_a_takeover_reads_positions_of_its_own_reader_only(
    explain_reader: Explain, case: Case, today: datetime
) -> None:
    plan = explain_reader(
        "take_over",
        "outbox.log",
        lanes=LANES,
        since=-1,
        oldest=today,
        newest=today + DAY,
    )

    assert plan.sequential() == set()
    assert plan.indexes() <= {"position_pkey", "message_lane_idx"}
    assert rows_of(plan, "message", "position") <= 2 * len(LANES) * case.days


def test_what_waits_is_found_and_loaded_without_reading_what_is_settled(
    explain_reader: Explain, readers_url: str, case: Case, today: datetime
) -> None:
    due = explain_reader(
        "find_due",
        lanes=LANES,
        moments=[today - DAY * 100] * 16,
        entries=[-1] * 16,
        since=today,
        within=timedelta(seconds=1),
        max_rows=WAITING,
    )
    keys = explain_reader(
        "find_next_of_keys",
        lanes=[17] * 4,
        keys=["k1", "k17", "k33", "k49"],
        seqs=[-1] * 4,
        since=today,
        max_rows=250,
    )
    rows = waiting_of(readers_url, today)
    ids, created_ats, lanes, seqs, runs, entries = map(list, zip(*rows, strict=True))
    loaded = explain_reader(
        "claim_deferred",
        ids=ids,
        created_ats=created_ats,
        lanes=lanes,
        seqs=seqs,
        runs=runs,
        entries=entries,
        first=min(created_ats),
        last=max(created_ats),
        **LIMITS,
    )

    of_messages = {"deferral_message_idx", "deferral_settled_idx"}
    assert due.indexes() - of_messages == {"deferral_due_idx"}
    assert keys.indexes() - of_messages == {"deferral_key_idx"}
    assert loaded.indexes() - of_messages == {"message_pkey"}
    # A sort would read all messages that are due at the same time.
    assert due.sorts() == []
    for plan, found in (due, WAITING), (keys, 4), (loaded, 100):
        assert plan.sequential() == set()
        assert min(plan.partitions("deferral")) == day(today)
        # Its entries, and those of all readers of each message.
        assert rows_read(plan.scans("deferral")) <= found * (1 + case.readers * 2)


def test_a_resumption_reads_no_entry_and_a_takeover_those_of_its_own_reader(
    explain_reader: Explain,
) -> None:
    resumed = explain_reader(
        "read_deferrals", lanes=LANES, entries=[10**9] * 16, max_rows=10
    )
    begun = explain_reader(
        "read_deferrals", lanes=LANES, entries=[-1] * 16, max_rows=10
    )

    assert rows_of(resumed, "deferral") == 0
    # The merge of the partitions reads the first entry of each.
    assert rows_of(begun, "deferral") <= len(LANES) * (
        10 + len(begun.scans("deferral"))
    )
    for plan in resumed, begun:
        assert plan.sequential() == set()
        assert plan.indexes() == {"deferral_pkey"}
        assert rows_read(plan.scans("deferral")) == rows_of(plan, "deferral")


def test_a_settlement_reads_the_messages_that_it_schedules_and_nothing_else(
    explain_reader: Explain, readers_url: str, today: datetime
) -> None:
    rows = waiting_of(readers_url, today)
    ids, created_ats, lanes, seqs, runs, _ = map(list, zip(*rows, strict=True))
    count = len(rows)
    log = {
        "ids": ids,
        "created_ats": created_ats,
        "lanes": lanes,
        "seqs": seqs,
        "runs": runs,
        "attempts": [0] * count,
        "keys": [None] * count,
    }
    bounds = {"first": min(created_ats), "last": max(created_ats)}
    deferred = explain_reader(
        "defer",
        causes=["scheduled"] * count,
        delays=[None] * count,
        reasons=[None] * count,
        **log,
        **bounds,
    )
    ended = explain_reader("end_runs", outcomes=["published"] * count, **log)
    stored = explain_reader(
        "store_positions",
        "outbox.log",
        starts=[today] * 16,
        ends=[today + DAY] * 16,
        lanes=LANES,
        numbers=[10**9] * 16,
        up_tos=[10**9] * 16,
        snapshots=["1:1:"] * 16,
        late_up_tos=[None] * 16,
        late_snapshots=[None] * 16,
        messages=[1] * 16,
        deferred=[0] * 16,
        next_xids=["1"] * 16,
    )

    assert deferred.indexes() == {"message_pkey"}
    assert deferred.partitions() == {day(today)}
    assert rows_of(deferred, "message") == count
    for plan in deferred, ended, stored:
        assert plan.sequential() == set()
        assert plan.scans("deferral", "position") == []
    assert ended.scans() == stored.scans() == []


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
def test_an_append_looks_for_each_id_in_the_days_since_the_first_one(
    filled_url: str, today: datetime, mode: str
) -> None:
    batch = [Message("t", b"") for _ in range(500)]
    settings = {**SETTINGS, "plan_cache_mode": mode}
    with executed_plans(filled_url, "pillarbox_application", settings) as execute:
        plan = Explained(execute(load("relay", "append_messages"), rows(batch)), {})
    assert plan.sequential() == set()
    assert plan.partitions() <= {day(today + n * DAY) for n in (-1, 0, 1)}
    assert rows_of(plan, "message") == 0
    assert plan.rows_removed() == 0
    assert len(plan.conditions()) > 0
    assert all("id = m.id" in condition for condition in plan.conditions())
