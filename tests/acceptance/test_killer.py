"""A message that kills its process each time ends in the dead letters, nothing else."""

from pathlib import Path

import pytest

from outbox import Message
from relay.publishers.postgres import PostgresPublisher
from tests.acceptance.conftest import show
from tests.acceptance.inspection import Inspection
from tests.acceptance.killer import MAX_ATTEMPTS, POISON, TOPIC
from tests.fixtures.processes import RunningProcess, command_line
from tests.fixtures.waiting import wait_for

pytestmark = [pytest.mark.fault, pytest.mark.timeout(600)]

_CONSUMER = "tests.acceptance.killer:killer"


class Supervisor:
    """Starts the consumer, and again whenever it died."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.deaths = -1
        self._log = directory / "killer.log"
        self._environment = environment
        self._process: RunningProcess | None = None

    def look_after(self) -> None:
        """See that the consumer is running."""
        if self._process is None or not self._process.is_running():
            self.deaths += 1
            assert self.deaths < 20, "it dies again and again"
            self._process = RunningProcess(
                command_line("inbox", "--log-level=debug", "run", _CONSUMER),
                self._log,
                self._environment,
            )

    def end(self) -> None:
        """End what is running."""
        if self._process is not None:
            self._process.kill()
            show(self._process)


async def test_a_message_that_kills_its_process_is_given_up(
    database_url: str, inspection: Inspection, tmp_path: Path, full: bool
) -> None:
    count = 2_000 if full else 200
    messages = [
        Message(
            TOPIC,
            POISON if n == count // 3 else b"%d" % n,
            key=f"key {n % (count // 4)}",
        )
        for n in range(count)
    ]
    inspection.run(
        "CREATE TABLE noted (number int);"
        f"INSERT INTO inbox.subscription VALUES ('killer', '{TOPIC}')"
    )
    async with PostgresPublisher.from_url(database_url) as publisher:
        await publisher.publish(messages)
    supervisor = Supervisor(
        tmp_path,
        {"PILLARBOX_DATABASE_URL": database_url, "PILLARBOX_BROKER_URL": database_url},
    )

    def is_all_settled() -> bool:
        supervisor.look_after()
        query = "SELECT FROM inbox.delivery WHERE acked_at IS NULL LIMIT 1"
        return not inspection.rows(query)

    try:
        wait_for("all is settled", is_all_settled, seconds=300)
    finally:
        supervisor.end()
    assert supervisor.deaths == MAX_ATTEMPTS
    letters = inspection.rows(
        "SELECT payload, attempts, error_reason, status FROM inbox.dead_letter"
    )
    reason = f"was started {MAX_ATTEMPTS} times and never came to an end"
    assert letters == [(POISON, MAX_ATTEMPTS, reason, "PENDING")]
    noted = [number for (number,) in inspection.rows("SELECT number FROM noted")]
    assert sorted(noted) == [n for n in range(count) if n != count // 3]
