"""A relay process with another broker waits until somebody switches to it."""

from pathlib import Path

import pytest

from pillarbox.outbox.cli.main import main
from pillarbox.relay.events import BrokerDiffers
from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import Relays
from tests.acceptance.test_watching import Watched
from tests.fixtures.relay import insert, numbered, unsettled
from tests.fixtures.waiting import wait_for


def test_a_relay_with_another_broker_is_not_ready_until_a_switch(
    database_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    with (
        Relays(database_url, tmp_path) as relays,
        Inspection(database_url) as inspection,
    ):
        first = relays.start(f"sink://{here}")
        other = relays.start(f"sink://{there}", "--listen=127.0.0.1:0")
        watched = Watched(other)
        watched.wait_until(503, BrokerDiffers.waits_for)
        surge = relays.start(f"sink://{here}", "--listen=127.0.0.1:0")
        Watched(surge).wait_until(200)

        insert(database_url, *numbered("abcdef", 10))
        wait_for("all are published", lambda: unsettled(database_url) == 0)
        assert there.read_bytes() == b""
        assert main(["status", "--database", database_url]) in {0, 1}
        assert f"broker     sink://{here}" in capsys.readouterr().out
        main(["readers", "list", "--database", database_url])
        assert f"sink://{here}" in capsys.readouterr().out

        relays.start(f"sink://{there}", "--switch-broker")
        watched.wait_until(200)
        before = here.read_bytes()
        Watched(surge).wait_until(503, BrokerDiffers.waits_for)
        wait_for(
            "the relays of the old broker hold no lanes",
            lambda: inspection.lanes().keys().isdisjoint({first.pid, surge.pid}),
        )
        insert(database_url, *numbered("abcdef", 10))
        wait_for("all are published", lambda: unsettled(database_url) == 0)
        assert there.read_bytes().count(b";") == 60
        assert here.read_bytes() == before
