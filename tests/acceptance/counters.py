"""Counter processes on one database, and the messages they have counted."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pillarbox.outbox.brokers.postgres import PostgresOptions
from pillarbox.outbox.postgres.advisory_lock import reader_class
from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import as_role
from tests.fixtures.processes import Processes, RunningProcess, pillarbox_line
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for

COUNTER = "tests.acceptance.counter:counter"
IMPATIENT = "tests.acceptance.counter:impatient"
CLUMSY = "tests.acceptance.counter:clumsy"
POOLED = "tests.acceptance.counter:pooled"
WIDE = "tests.acceptance.counter:wide"
_TABLES = """
    CREATE TABLE counted (
        position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        message_id uuid, key text, number int, pid int,
        at timestamptz DEFAULT clock_timestamp()
    );
    GRANT SELECT, INSERT ON counted TO pillarbox_consumer;
"""
_SHARES = """
    SELECT count(*)
      FROM pg_locks
     WHERE locktype = 'advisory' AND classid = %s AND objid < 48 AND granted
       AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
     GROUP BY pid
"""
# A duplicate waits for the other's receipt, not for the table.
_AT_WORK = """
    SELECT count(DISTINCT application_name)
      FROM pg_locks JOIN pg_stat_activity USING (pid)
     WHERE relation = 'counted'::regclass AND NOT granted
"""


class Counters(Processes):
    """Starts counters, and kills them on exit."""

    def __init__(self, url: str, directory: Path, inspection: Inspection) -> None:
        database = as_role(url, "pillarbox_consumer")
        super().__init__(directory, "counter", PILLARBOX_DATABASE_URL=database)
        self._inspection = inspection
        inspection.run(_TABLES)

    def start(
        self, broker: str | None = None, consumer: str = COUNTER, **variables: str
    ) -> RunningProcess:
        """Start another counter, and return once it has reached database and broker.

        Its broker is at the URL `broker`, or is the database.
        """
        counter = self.start_without_waiting(broker, consumer, **variables)
        counter.wait_for_log("ConsumerStarted")
        return counter

    def start_without_waiting(
        self, broker: str | None = None, consumer: str = COUNTER, **variables: str
    ) -> RunningProcess:
        """Start another counter, without checking that it starts."""
        environment = {**variables, "PGAPPNAME": f"counter-{len(self._started)}"}
        if broker is not None:
            environment["PILLARBOX_BROKER_URL"] = broker
        words = ("consume", consumer, "--log-level=debug")
        line = pillarbox_line(variables, *words)
        return self.begin(line, **environment)

    def count(self) -> int:
        """Return how many times messages were handled."""
        return self._inspection.count("counted")

    def count_of(self, pid: int) -> int:
        """Return how many times one counter has handled a message."""
        return self._inspection.count("counted WHERE pid = %s", pid)

    def shares(self, url: str) -> list[int]:
        """Return how many lanes of the broker in a database each counter holds."""
        lock_class = reader_class("counter") & 0xFFFFFFFF
        rows = execute(PostgresOptions.parse(url)[0], _SHARES, [lock_class])
        return [int(share) for (share,) in rows]

    def wait_for_count(self, count: int) -> None:
        """Wait until messages were handled `count` times; fail if progress stops."""
        while (counted := self.count()) < count:
            wait_for("it goes on", partial(self._has_more, counted), pause=0.05)

    def are_at_work(self, counters: int = 2) -> bool:
        """Return whether that many counters, or more, wait for the table."""
        ((found,),) = self._inspection.rows(_AT_WORK)
        return int(found) >= counters

    def numbers(self, *, ordered: bool = True) -> dict[str, list[int]]:
        """Return the numbers of each key's messages, in the order of handling.

        Sort them if the broker doesn't keep that order.
        """
        numbers: dict[str, list[int]] = defaultdict(list)
        query = "SELECT key, number FROM counted ORDER BY position"
        for key, number in self._inspection.rows(query):
            numbers[key].append(number)
        if not ordered:
            return {key: sorted(of_key) for key, of_key in numbers.items()}
        return dict(numbers)

    def expect_each_once(
        self, numbers: dict[str, list[int]], *, ordered: bool = True
    ) -> None:
        """Check that each message took effect once, and that none is a dead letter."""
        assert self.numbers(ordered=ordered) == numbers
        receipts = self._inspection.count("inbox.receipt WHERE consumer = 'counter'")
        assert receipts == sum(map(len, numbers.values()))
        assert self._inspection.count("inbox.dead_letter") == 0

    def logged(self, event: str) -> list[int]:
        """Return how many times each counter has logged an event."""
        return [counter.log().count(event) for counter in self._started]

    def all_have_logged(self, event: str, before: Sequence[int]) -> bool:
        """Return whether each has logged an event since `logged` returned `before`."""
        return all(
            now > then for now, then in zip(self.logged(event), before, strict=True)
        )

    def _has_more(self, counted: int) -> bool:
        return self.count() > counted
