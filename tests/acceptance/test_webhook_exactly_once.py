"""Each message takes effect once, from the outbox through a webhook to a database."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.acceptance.counters import Counters
from tests.acceptance.hook import Hook
from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import Relays, as_role
from tests.acceptance.writer import Writer
from tests.fixtures.http import SECRET, SECRET_ENV
from tests.fixtures.waiting import wait_for

pytestmark = pytest.mark.fault

# So that killing the receiver loses answers about committed messages.
OPTIONS = ("--batch-size=20", "--concurrency=2")


@pytest.fixture
def hook(
    counters: Counters,
    database_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Hook]:
    """Yield an endpoint with a consumer's privileges, whose effects are counted."""
    monkeypatch.setenv(SECRET_ENV, SECRET)
    url = as_role(database_url, "pillarbox_consumer")
    with Hook("counting", tmp_path, "--factory", PILLARBOX_DATABASE_URL=url) as started:
        yield started


def reached(counters: Counters, enough: int) -> bool:
    return counters.count() > enough


@pytest.mark.timeout(300)
def test_each_message_takes_effect_once_when_both_sides_are_killed(
    hook: Hook,
    counters: Counters,
    relays: Relays,
    writer: Writer,
    inspection: Inspection,
    full: bool,
) -> None:
    writer.add(2_000 if full else 200)
    broker = f"{hook.url}?secret_env={SECRET_ENV}&allow_private=true"
    relay = relays.start(broker, *OPTIONS)
    for part in range(1, 5):
        enough = part * writer.added // 8
        wait_for("it goes on", partial(reached, counters, enough))
        if part % 2:
            hook.kill()
            # So that there is work left, however late the kill came.
            writer.add(50)
            relay.wait_for_log("BrokerLost")
            hook.start()
        else:
            relay.kill()
            relay = relays.start(broker, *OPTIONS)
    inspection.wait_until_settled()
    counters.expect_each_once(writer.numbers())
    assert inspection.charged() == 0
