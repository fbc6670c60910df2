"""The demo over every broker: it counts by itself, and ends with 0 if all is right."""

import os
import subprocess
import sys

import pytest

from examples.shop.brokers import PRIVATE
from tests.fixtures.processes import ROOT


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "examples.shop", *arguments],
        check=False,
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "PILLARBOX_DATABASE_URL"},
        capture_output=True,
        text=True,
    )


@pytest.mark.fault
@pytest.mark.timeout(600)
@pytest.mark.parametrize("broker", [None, *PRIVATE])
def test_everything_holds(broker: str | None) -> None:
    chosen = [] if broker is None else ["--broker", broker]

    shown = demo("--orders", "200", "--duplicates", "20", *chosen)

    assert shown.returncode == 0, shown.stdout[-6000:] + shown.stderr
    assert "everything holds" in shown.stdout
    assert "effects that happened twice" in shown.stdout


def test_a_broker_that_is_not_known_is_told_with_the_ones_that_are() -> None:
    shown = demo("--broker", "pigeon")

    assert shown.returncode == 2
    assert shown.stderr.count("\n") == 1
    assert "one of redis, rabbitmq" in shown.stderr
