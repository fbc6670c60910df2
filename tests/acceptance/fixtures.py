"""Fixtures of the acceptance tests: relay processes, a sink, database queries."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pillarbox.outbox.testing.postgres import PostgresServer
from tests.acceptance.brokers import BROKERS, Broker, outbox
from tests.acceptance.counters import Counters
from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import Relays
from tests.acceptance.sink import Sink
from tests.acceptance.writer import Writer


@pytest.fixture
def inspection(database_url: str) -> Iterator[Inspection]:
    with Inspection(database_url) as opened:
        yield opened


@pytest.fixture
def writer(database_url: str) -> Iterator[Writer]:
    with Writer(database_url) as opened:
        yield opened


@pytest.fixture
def relays(database_url: str, tmp_path: Path) -> Iterator[Relays]:
    """Start relays of `database_url`; their logs are shown if the test fails."""
    with Relays(database_url, tmp_path) as started:
        yield started


@pytest.fixture
def counters(
    database_url: str, tmp_path: Path, inspection: Inspection
) -> Iterator[Counters]:
    """Start consumers that count in `database_url`, which is also their broker."""
    with Counters(database_url, tmp_path, inspection) as started:
        yield started


@pytest.fixture
def broker(kind: str, database_url: str) -> Iterator[Broker]:
    """Run a broker of this kind, a parameter of the test."""
    if kind == "postgres":
        yield outbox(database_url)
        return
    with BROKERS[kind]() as running:
        yield running


@pytest.fixture
def sink(tmp_path: Path) -> Sink:
    """Return a sink that acks at once."""
    return Sink(tmp_path / "arrivals")


@pytest.fixture
def slow_sink(tmp_path: Path) -> Sink:
    """Return a sink that acks after a delay: batches are usually in flight."""
    return Sink(tmp_path / "arrivals", latency=0.2)


@pytest.fixture
def private_database_url(migrated_server: PostgresServer) -> str:
    """Return a migrated database on a server that the test can stop."""
    return migrated_server.url


@pytest.fixture
def full(pytestconfig: pytest.Config) -> bool:
    """Return whether to test faults at full scale, which takes minutes."""
    return bool(pytestconfig.getoption("full"))
