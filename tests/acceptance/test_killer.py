"""A message that kills its process each time ends in the dead letters, nothing else."""

from pathlib import Path

import pytest

from outbox import Message
from relay.publisher import Publisher
from relay.publishers.postgres import PostgresPublisher
from relay.publishers.redis import RedisPublisher
from tests.acceptance.conftest import show
from tests.acceptance.inspection import Inspection
from tests.acceptance.killer import MAX_ATTEMPTS, POISON, TOPIC
from tests.fixtures.processes import RunningProcess, command_line
from tests.fixtures.waiting import wait_for

pytestmark = [pytest.mark.fault, pytest.mark.timeout(600)]

_CONSUMER = "tests.acceptance.killer:killer"


def publisher_of(url: str) -> Publisher:
    kind = RedisPublisher if url.startswith("redis:") else PostgresPublisher
    return kind.from_url(url)


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


@pytest.fixture(params=["postgres", "redis"])
def broker_url(request: pytest.FixtureRequest, database_url: str) -> str:
    if request.param == "postgres":
        return database_url
    url: str = request.getfixturevalue("redis_url")
    return url


async def test_a_message_that_kills_its_process_is_given_up(
    database_url: str,
    broker_url: str,
    inspection: Inspection,
    tmp_path: Path,
    full: bool,
) -> None:
    count = 2_000 if full else 200
    poison = count // 3
    messages = [
        Message(
            TOPIC, POISON if n == poison else b"%d" % n, key=f"key {n % (count // 4)}"
        )
        for n in range(count)
    ]
    inspection.run(
        "CREATE TABLE noted (number int);"
        f"INSERT INTO inbox.subscription VALUES ('killer', '{TOPIC}')"
    )
    async with publisher_of(broker_url) as publisher:
        await publisher.publish(messages)
    supervisor = Supervisor(
        tmp_path,
        {"PILLARBOX_DATABASE_URL": database_url, "PILLARBOX_BROKER_URL": broker_url},
    )

    def is_all_settled() -> bool:
        supervisor.look_after()
        query = """
            SELECT (SELECT count(*) FROM noted)
                 + (SELECT count(*) FROM inbox.dead_letter)
        """
        return inspection.rows(query) >= [(count,)]

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
    assert sorted(noted) == [n for n in range(count) if n != poison]
