"""The demo over every broker: it checks its own counts, and exits with 0 on success."""

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from examples.shop.brokers import NAMES
from examples.shop.brokers import broker as chosen
from pillarbox import Message
from pillarbox.inbox.demo.orders import TENANT_VARIABLE, TOPIC, is_ours
from pillarbox.outbox.errors import ConfigError
from tests.fixtures.processes import ROOT
from tests.fixtures.variants import as_variant
from tests.fixtures.waiting import wait_for

BY_DEFAULT, *OTHERS = NAMES


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "PILLARBOX_DATABASE_URL"}


@pytest.mark.long
@pytest.mark.fault
@pytest.mark.timeout(600)
@pytest.mark.parametrize("broker", [BY_DEFAULT, *map(as_variant, OTHERS)])
def test_all_checks_pass_and_the_web_page_of_the_shop_stays_open_until_ctrl_c(
    broker: str, tmp_path: Path
) -> None:
    log = tmp_path / "shown"
    with log.open("wb") as output:
        demo = subprocess.Popen(
            [
                *(sys.executable, "-m", "examples.shop", "--broker", broker),
                *("--orders", "100", "--web", "0"),
            ],
            cwd=ROOT,
            env=environment(),
            stdout=output,
            stderr=output,
        )

    def is_open() -> bool:
        assert demo.poll() is None, log.read_text()[-6000:]
        return "Press Ctrl-C" in log.read_text()

    try:
        wait_for("the page", is_open, seconds=400)
        (link,) = re.findall(r"page +(http://\S+)/login#", log.read_text())
        with urllib.request.urlopen(f"{link}/login") as page:
            assert b"pillarbox" in page.read()
        demo.send_signal(signal.SIGINT)
        assert demo.wait(timeout=120) == 0
    finally:
        demo.kill()
        demo.wait()
    shown = log.read_text()
    assert shown.endswith("stopping\n")
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{link}/login")
    assert "everything holds" in shown
    assert "effects that happened twice" in shown
    assert "SIGKILL billing" in shown
    assert "LedgerDownError: the ledger does not answer" in shown
    assert counted(shown, "dead letters of billing") > 0
    assert counted(shown, "dead letters that are PENDING") == 0


def counted(said: str, what: str) -> int:
    found = re.search(rf"✔ {what} +([\d,]+)\n", said)
    assert found is not None, said
    return int(found[1].replace(",", ""))


@pytest.mark.parametrize(
    ("broker", "said"),
    [
        ("pigeon", "one of postgres, redis, rabbitmq"),
        ("sqs", "use sns"),
        ("sqs://eu-west-1/?fifo=true", "use sns"),
        ("sns://eu-west-1/", "add fifo=true"),
        ("https://shop.example/hook", "pass another one"),
    ],
)
def test_the_error_for_a_broker_that_the_demo_cannot_use_has_a_remedy(
    broker: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said), chosen(broker, "postgresql://"):
        pass


def test_orders_of_an_earlier_demo_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    earlier, ours = (Message(TOPIC, {}, tenant=tenant) for tenant in ("one", "two"))

    monkeypatch.setenv(TENANT_VARIABLE, "two")
    assert (is_ours(earlier), is_ours(ours)) == (False, True)
    monkeypatch.delenv(TENANT_VARIABLE)
    assert is_ours(earlier)
