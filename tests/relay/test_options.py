"""`pillarbox relay` passes its options on."""

from datetime import timedelta

import pytest

import pillarbox.relay.cli
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.retry import RetryPolicy
from pillarbox.relay.config import RelayConfig


def test_every_option_reaches_the_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, object] = {}

    def make(url: str, publisher: object, config: RelayConfig, **more: object) -> None:
        made.update(more, config=config)
        raise ConfigError("made")

    monkeypatch.setattr(pillarbox.relay.cli, "Relay", make)
    options = (
        *("--batch-size=7", "--concurrency=3", "--max-payload-bytes=9"),
        *("--lease=5s", "--publish-timeout=6s", "--drain=8s", "--max-attempts=2"),
        *("--strict-order", "--switch-broker", "--reader=audit", "--from-now"),
    )
    database = "postgresql://localhost/shop"
    assert main(["relay", f"--database={database}", "--broker=memory://", *options])
    del made["observers"]
    assert made == {
        "config": RelayConfig(
            batch_size=7,
            concurrency=3,
            max_payload_bytes=9,
            lease=timedelta(seconds=5),
            publish_timeout=timedelta(seconds=6),
            drain=timedelta(seconds=8),
            strict_order=True,
            retry=RetryPolicy(max_attempts=2),
        ),
        "switch_broker": True,
        "from_now": True,
        "reader": "audit",
        "broker": "memory://",
    }
