"""A relay that can't start prints one line with the reason and exits with status 2."""

import pytest

from outbox.cli.main import main
from outbox.testing.lifetime import free_port
from tests.acceptance.relays import Relays

Capture = pytest.CaptureFixture[str]


def refusal(database: str, broker: str, capsys: Capture) -> str:
    """Run a relay that must fail, and return the one line that it prints."""
    assert main(["relay", f"--database={database}", f"--broker={broker}"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("pillarbox: ")
    return line


def test_an_unreachable_database_is_named(capsys: Capture) -> None:
    port = free_port()
    url = f"postgresql://someone:secret@127.0.0.1:{port}/shop"
    line = refusal(url, "memory://", capsys)
    assert (
        f"can't reach the database postgresql://someone@127.0.0.1:{port}/shop" in line
    )
    assert "secret" not in line


def test_a_database_of_another_kind_is_refused(capsys: Capture) -> None:
    line = refusal("mysql://root@localhost/shop", "memory://", capsys)
    assert "'mysql'" in line
    assert "use postgresql://" in line


@pytest.mark.parametrize("broker", ["nonsense", ":"])
def test_the_error_for_an_unknown_publisher_lists_the_known_ones(
    broker: str, relays: Relays
) -> None:
    relay = relays.start_without_waiting(broker)
    assert relay.wait() == 2
    (line,) = relay.log().splitlines()
    assert repr(broker.partition(":")[0]) in line
    assert "memory" in line
    # Third-party publishers are listed, too.
    assert "sink" in line


def test_the_error_for_a_database_without_tables_says_migrate(
    database_url: str, empty_database_url: str, capsys: Capture
) -> None:
    # The database of the outbox, and that of a broker.
    for database, broker in (
        (empty_database_url, "memory://"),
        (database_url, empty_database_url),
    ):
        assert "run pillarbox migrate" in refusal(database, broker, capsys)


def test_the_error_for_a_missing_url_says_where_to_set_it(
    database_url: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PILLARBOX_BROKER_URL", raising=False)
    line = refusal(database_url, "", capsys)
    assert "--broker" in line
    assert "PILLARBOX_BROKER_URL" in line
