"""`pillarbox brokers` lists the options of broker URLs."""

import json
import subprocess
import sys

import pytest

from outbox.brokers.options import brokers
from outbox.cli.main import main


def test_without_a_name_each_broker_is_listed_with_its_urls(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["brokers"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(brokers())
    assert "nats      nats://, tls://" in lines


def test_each_option_of_a_broker_has_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for broker, kind in brokers().items():
        assert main(["brokers", broker]) == 0
        _, *lines = capsys.readouterr().out.splitlines() or [""]
        if kind.client:
            assert set(kind.client) <= {word.strip(",") for word in lines.pop().split()}
        options = [row.name for row in kind.table()]
        assert (broker, [line.split()[0] for line in lines]) == (broker, options)
        assert not any("`" in line for line in lines)


def test_a_broker_can_be_given_by_name_by_scheme_or_by_url(
    capsys: pytest.CaptureFixture[str],
) -> None:
    takes = "how long an entry stays with a dead replica before another one takes it"
    expected = {
        "name": "reclaim_after",
        "side": "consumer",
        "default": "1m",
        "help": takes,
    }
    for said in ("rediss", "redis://host/0", "redis"):
        assert main(["brokers", said, "--json"]) == 0
        options = {it["name"]: it for it in json.loads(capsys.readouterr().out)}
        assert options["reclaim_after"] == expected, said
    assert main(["brokers", "carrier-pigeon"]) == 2
    assert "installed: http, kafka" in capsys.readouterr().err


def test_listing_options_needs_no_client_library() -> None:
    program = (
        "import sys\n"
        "sys.modules |= dict.fromkeys(['psycopg', 'redis', 'nats', 'pika'])\n"
        "from outbox.cli.main import main\n"
        "sys.exit(main(['brokers', 'postgres']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "unsubscribed" in done.stdout
