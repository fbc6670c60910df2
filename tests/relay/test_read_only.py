"""A relay that can't record what it publishes publishes nothing."""

import asyncio
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest

from pillarbox import ConfigError, Message
from pillarbox.outbox.errors import DatabaseUnavailableError
from pillarbox.outbox.log.settle import WRITES
from pillarbox.outbox.testing.postgres import PostgresServer
from pillarbox.relay.dead_letters.retry import PublishingRetrier
from pillarbox.relay.events import DatabaseLost, LeaseLost, LeaseTaken
from tests.fixtures.dead_letters import give_up, retry
from tests.fixtures.passwords import set_password
from tests.fixtures.proxy import Proxy
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import Running, insert, running, unsettled
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for
from tests.servers.standby import private_standby

pytestmark = pytest.mark.usefixtures("eager")
WRITABLE = "?options=-c%20default_transaction_read_only%3Doff"
RECORDED = "SELECT 1 FROM outbox.position HAVING sum(messages) = 2"
COPIED = "SELECT 1 FROM outbox.message WHERE topic = 'during'"
END_RELAY = """
    SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity
     WHERE usename = 'mary' AND datname = current_database()
"""


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Relays try to take their lanes again soon."""
    monkeypatch.setattr("pillarbox.outbox.postgres.lease.RETRY", 0.1)


def relays_url(url: str) -> str:
    return set_password(url, "mary", "secret")


def of_role(url: str, mode: str) -> None:
    execute(url, f"ALTER ROLE mary SET default_transaction_read_only = {mode}")
    execute(url, END_RELAY)


def of_server(url: str, mode: str) -> None:
    """As a managed service does whose disk is full: sessions that are open, too."""
    execute(url, f"ALTER SYSTEM SET default_transaction_read_only = {mode}")
    execute(url, "SELECT pg_reload_conf()")


def assert_advised(relay: Running, words: str) -> None:
    assert any(words in lost.remedy for lost in relay.events.of(DatabaseLost))


async def until_refused(relay: Running) -> None:
    """Wait until no lane is held and the relay has tried to take them again."""
    await relay.events.wait_for(LeaseLost)
    await relay.events.wait_for(DatabaseLost, len(relay.events.of(DatabaseLost)) + 5)


@pytest.mark.parametrize("make", [of_role, of_server])
async def test_a_relay_publishes_nothing_and_does_not_start_while_it_may_not_write(
    make: Callable[[str, str], None], migrated_server: PostgresServer
) -> None:
    url = migrated_server.url + WRITABLE
    marys = relays_url(migrated_server.url)
    publisher = ScriptedPublisher()
    async with running(marys, publisher) as relay:
        await relay.events.wait_for(LeaseTaken)
        make(url, "on")
        await until_refused(relay)
        insert(url, Message("t", b""))
        await until_refused(relay)
        for _ in range(3):
            with pytest.raises(DatabaseUnavailableError, match="accepts no writes"):
                async with running(marys, publisher):
                    pass
        assert publisher.calls == []
        assert_advised(relay, "default_transaction_read_only")
        make(url, "off")
        await publisher.until_acked(1)
    assert len(publisher.acked) == 1


async def test_a_relay_publishes_nothing_without_the_right_to_record_it(
    migrated_server: PostgresServer,
) -> None:
    url = migrated_server.url
    publisher = ScriptedPublisher()
    for table in WRITES:
        async with running(relays_url(url), publisher) as relay:
            await relay.events.wait_for(LeaseTaken)
            await asyncio.to_thread(wait_for, "none left", lambda: not unsettled(url))
            calls = len(publisher.calls)
            execute(url, f"REVOKE INSERT ON {table} FROM pillarbox_relay")
            await until_refused(relay)
            insert(url, Message("t", b""))
            await until_refused(relay)
            assert len(publisher.calls) == calls
            assert_advised(relay, "pillarbox doctor")

        with pytest.raises(ConfigError, match=f"{table}.*GRANT pillarbox_relay"):
            async with running(relays_url(url), publisher):
                pass
        assert len(publisher.calls) == calls
        execute(url, f"GRANT INSERT ON {table} TO pillarbox_relay")
    assert len(publisher.calls) == len(WRITES) - 1


async def test_a_relay_publishes_nothing_from_a_standby_behind_the_same_address(
    migrated_server: PostgresServer,
) -> None:
    url = migrated_server.url
    insert(url, Message("before", b""))
    publisher = ScriptedPublisher()
    proxy, through = Proxy.in_front_of(relays_url(url))
    with private_standby(url) as standby, proxy:
        async with running(through, publisher) as relay:
            await publisher.until_acked(1)
            insert(url, Message("after", b""))
            await publisher.until_acked(2)
            await asyncio.to_thread(
                wait_for, "replay", lambda: execute(standby.url, RECORDED)
            )
            port = urlsplit(standby.url).port
            assert port is not None
            proxy.redirect(port)
            await until_refused(relay)
            insert(url, Message("during", b""))
            await asyncio.to_thread(
                wait_for, "replay", lambda: execute(standby.url, COPIED)
            )
            await until_refused(relay)
            assert publisher.topics() == ["before", "after"]
            assert_advised(relay, "standby")
            standby.promote()
            await publisher.until_acked(3)
    assert publisher.topics() == ["before", "after", "during"]


async def test_a_dead_letter_is_not_published_again_while_that_cannot_be_recorded(
    migrated_server: PostgresServer,
) -> None:
    url = migrated_server.url
    give_up(url, Message("t", b""))
    mary = relays_url(url)
    of_role(url, "on")
    publisher = ScriptedPublisher()
    with pytest.raises(DatabaseUnavailableError, match="read-only transaction"):
        await retry(PublishingRetrier(mary, lambda: publisher))
    assert publisher.calls == []
