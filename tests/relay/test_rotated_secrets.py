"""A password that is rotated in a URL's file is used without a restart."""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import psycopg
import pytest

from pillarbox import Message
from pillarbox.outbox.administration.connection import administration
from pillarbox.outbox.errors import BrokerUnavailableError, DatabaseUnavailableError
from pillarbox.outbox.postgres.connection import connect, conninfo
from pillarbox.outbox.testing.postgres import PostgresServer
from pillarbox.outbox.url import FileUrl
from pillarbox.relay.events import BatchSettled, BrokerLost, DatabaseLost, LeaseTaken
from pillarbox.relay.publisher import Acked, Checkable, Confirmation, InDatabase
from pillarbox.relay.renewed_publisher import RenewedPublisher, publisher_of
from tests.fixtures.passwords import ask_for_passwords, set_password
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import insert, running
from tests.fixtures.sessions import execute

VARIABLE = "PILLARBOX_DATABASE_URL_FILE"
END_RELAY = """
    SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity
     WHERE usename = 'mary' AND datname = current_database()
"""


def held(file: Path, url: str) -> FileUrl:
    file.write_text(f"{url}\n")
    return FileUrl.read(VARIABLE, str(file))


async def test_a_relay_reconnects_with_the_password_that_was_rotated(
    migrated_server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pillarbox.outbox.postgres.lease.RETRY", 0.1)
    url = migrated_server.url
    file = tmp_path / "url"
    mary = held(file, set_password(url, "mary", "old"))
    ask_for_passwords(url, "mary")
    publisher = ScriptedPublisher()
    async with running(mary, publisher) as relay:
        await relay.events.wait_for(LeaseTaken)
        # The server has the new password before the file, and the file is missing for
        # a moment.
        renewed = set_password(url, "mary", "new")
        file.unlink()
        execute(url, END_RELAY)
        await relay.events.wait_for(DatabaseLost, 3)
        insert(url, Message("t", b""))
        file.write_text(renewed)
        await publisher.until_acked(1)


async def test_every_way_to_connect_reads_the_file_again(
    migrated_server: PostgresServer, tmp_path: Path
) -> None:
    url = migrated_server.url
    file = tmp_path / "url"
    mary = held(file, set_password(url, "mary", "old"))
    ask_for_passwords(url, "mary")
    file.write_text(set_password(url, "mary", "new"))
    async with await connect(mary, application_name="test"):
        pass
    with administration(mary, application_name="test"):
        pass
    with psycopg.connect(conninfo(mary)):
        pass
    file.write_text("nonsense")
    with pytest.raises(DatabaseUnavailableError, match="database URL"):
        await connect(mary, application_name="test")


class Guarded:
    """A publisher whose broker accepts one password."""

    accepted = "old"

    def __init__(self, url: str) -> None:
        self.url = url
        self.is_open = False

    async def __aenter__(self) -> Self:
        await self.check()
        self.is_open = True
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.is_open = False

    async def publish(self, batch: Sequence[Message]) -> Sequence[Confirmation]:
        await self.check()
        return [Acked() for _ in batch]

    async def check(self) -> None:
        if f":{self.accepted}@" not in self.url:
            raise BrokerUnavailableError("wrong password")


async def test_a_relay_reconnects_to_a_broker_whose_password_was_rotated(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "url"
    made: list[Guarded] = []

    def make(url: str) -> Guarded:
        made.append(Guarded(url))
        return made[-1]

    publisher = RenewedPublisher(held(file, "redis://me:old@127.0.0.1"), make)
    assert isinstance(publisher, Checkable)
    async with running(database_url, publisher) as relay:
        monkeypatch.setattr(Guarded, "accepted", "new")
        insert(database_url, Message("t", b""))
        await relay.events.wait_for(BrokerLost)
        assert [it.is_open for it in made] == [True]
        file.write_text("redis://me:new@127.0.0.1")
        await relay.events.wait_for(BatchSettled)
        assert [it.is_open for it in made] == [False, True]
    assert not any(it.is_open for it in made)


@pytest.mark.parametrize(
    ("broker", "is_in_database"),
    [("postgres://me@127.0.0.1/x", True), ("redis://127.0.0.1", False)],
)
def test_a_renewed_publisher_says_whether_its_acks_may_be_lost_with_the_outbox(
    broker: str, is_in_database: bool, tmp_path: Path
) -> None:
    publisher = publisher_of(held(tmp_path / "url", broker))
    assert isinstance(publisher, InDatabase) is is_in_database


async def test_a_file_that_names_another_broker_changes_nothing_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "url"
    url = held(file, "redis://me:old@127.0.0.1")
    async with RenewedPublisher(url, Guarded) as publisher:
        file.write_text("redis://me:old@elsewhere")
        monkeypatch.setattr(Guarded, "accepted", "none")
        with pytest.raises(BrokerUnavailableError, match="wrong password"):
            await publisher.publish([Message("t", b"")])
        with pytest.raises(BrokerUnavailableError, match="restart the relay"):
            await publisher.publish([Message("t", b"")])
