"""A relay that can't start prints one line with the reason and exits with status 2."""

import pytest

from outbox.testing.lifetime import free_port
from tests.acceptance.relays import Relays


def refusal(relays: Relays, broker: str, **settings: str) -> str:
    """Start a relay that must fail, and return the one line that it prints."""
    options = [f"--{name.replace('_', '-')}={settings[name]}" for name in settings]
    relay = relays.start_without_waiting(broker, *options)
    assert relay.wait() == 2, relay.log()
    (line,) = relay.log().splitlines()
    assert line.startswith("pillarbox: ")
    return line


def test_an_unreachable_database_is_named(relays: Relays) -> None:
    port = free_port()
    url = f"postgresql://someone:secret@127.0.0.1:{port}/shop"
    line = refusal(relays, "memory://", database=url)
    assert (
        f"can't reach the database postgresql://someone@127.0.0.1:{port}/shop" in line
    )
    assert "secret" not in line


def test_a_database_of_another_kind_is_refused(relays: Relays) -> None:
    line = refusal(relays, "memory://", database="mysql://root@localhost/shop")
    assert "'mysql'" in line
    assert "use postgresql://" in line


@pytest.mark.parametrize("broker", ["nonsense", ":"])
def test_the_error_for_an_unknown_publisher_lists_the_known_ones(
    broker: str, relays: Relays
) -> None:
    line = refusal(relays, broker)
    assert repr(broker.partition(":")[0]) in line
    assert "memory" in line
    # Third-party publishers are listed, too.
    assert "sink" in line


def test_the_error_for_a_database_without_the_outbox_says_migrate(
    relays: Relays, empty_database_url: str
) -> None:
    line = refusal(relays, "memory://", database=empty_database_url)
    assert "run pillarbox migrate" in line


def test_the_error_for_a_database_without_the_inbox_says_migrate(
    relays: Relays, empty_database_url: str
) -> None:
    assert "run pillarbox migrate" in refusal(relays, empty_database_url)


def test_an_invalid_setting_is_refused(relays: Relays) -> None:
    assert "batch_size=0" in refusal(relays, "memory://", batch_size="0")


def test_the_error_for_a_missing_url_says_where_to_set_it(
    relays: Relays, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PILLARBOX_BROKER_URL", raising=False)
    line = refusal(relays, "")
    assert "--broker" in line
    assert "PILLARBOX_BROKER_URL" in line
