"""The alert rules are valid, have a runbook, and fire only when they should."""

import re
import shutil
import subprocess
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from docs.reference.events import events
from docs.reference.metrics import registry
from pillarbox import uuid7
from pillarbox.inbox.consuming.activity import ConsumerCounts
from pillarbox.inbox.consuming.metrics import ConsumerMetrics
from pillarbox.inbox.events import MessageHandled
from pillarbox.outbox.administration.doctor import find_quickly
from pillarbox.outbox.events import Observers, ProcessMeasured
from pillarbox.outbox.observability.database_measure import DatabaseMeasured
from pillarbox.outbox.observability.overview import read_overview
from pillarbox.outbox.observability.prometheus import DatabaseMetrics, PrometheusEvents
from pillarbox.relay.activity import RelayCounts
from pillarbox.relay.events import BatchPublished
from pillarbox.relay.metrics import RelayMetrics

ROOT = Path(__file__).parent.parent
RULES = ROOT / "docker" / "prometheus" / "pillarbox.rules.yaml"
PAGE = ROOT / "docs" / "runbook.md"

ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule
    for group in yaml.safe_load(RULES.read_text())["groups"]
    for rule in group["rules"]
}

LETTERS = 'dead_letter_total{schema="inbox",origin="consumer:billing"}'
ORIGIN = {"schema": "inbox", "origin": "consumer:billing"}
PAUSED = 'pillarbox_consumer_paused{consumer="billing"}'
BLOCKED_AGE = 'pillarbox_consumer_blocked_key_age_seconds{consumer="billing"}'
OVERDUE = (
    "pillarbox_consumer_longest_handler_seconds"
    '{{consumer="billing",handler="bill",overdue="{}"}}'
)
BILLING = {"consumer": "billing", "topic": "orders"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Series that make an alert fire within two hours, and series that don't."""

    alert: str
    firing: dict[str, str]
    quiet: dict[str, str]
    labels: dict[str, str] = field(default_factory=dict)


def buckets(name: str, bound: str, **labels: str) -> dict[str, str]:
    """Return a histogram that gains 60 durations a minute in one bucket."""
    about = "".join(f'{name}="{value}",' for name, value in labels.items())
    bounds = ("0.1", "1.0", "60.0", "300.0", "900.0", "+Inf")
    return {
        f'{name}_bucket{{{about}le="{le}"}}': (
            "0+60x120" if bounds.index(le) >= bounds.index(bound) else "0+0x120"
        )
        for le in bounds
    }


def counter(name: str, step: int, **labels: str) -> dict[str, str]:
    about = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return {f"{name}{{{about}}}": f"0+{step}x120"}


def measured(instance: str, database: str = "shop") -> str:
    """Return the series of when a process last measured the database."""
    name = "pillarbox_database_measured_timestamp_seconds"
    return f'{name}{{instance="{instance}",database="{database}"}}'


def findings(instance: str, *, check: str, severity: str) -> str:
    """Return the series of how many findings a process has."""
    return (
        f'pillarbox_findings{{instance="{instance}",database="shop",'
        f'check="{check}",severity="{severity}"}}'
    )


CONSUMER = "pillarbox_consumer_messages"
UPKEEP = {"database": "shop", "check": "upkeep"}
LANES = ('pillarbox_relay_lanes{instance="a"}', 'pillarbox_relay_lanes{instance="b"}')
CASES = [
    Case(
        alert="PillarboxNoRelay",
        firing=dict.fromkeys(LANES, "0+0x120"),
        quiet={LANES[0]: "48+0x120", LANES[1]: "0+0x120"},
    ),
    Case(alert="PillarboxNoRelay", firing={}, quiet={LANES[0]: "48+0x120"}),
    Case(
        alert="PillarboxLanesUnserved",
        firing=dict.fromkeys(LANES, "16+0x120"),
        quiet=dict.fromkeys(LANES, "24+0x120"),
    ),
    Case(
        alert="PillarboxBrokerUnavailable",
        firing={'pillarbox_relay_breaker_open{instance="a"}': "1+0x120"},
        # A trial succeeds now and then.
        quiet={'pillarbox_relay_breaker_open{instance="a"}': "0 1 0 1 " * 30 + "0"},
    ),
    Case(
        alert="PillarboxMessagesRefused",
        firing=counter("pillarbox_relay_messages_refused_total", 1, topic="orders"),
        quiet=counter("pillarbox_relay_messages_refused_total", 0, topic="orders"),
        labels={"topic": "orders"},
    ),
    Case(
        alert="PillarboxPublishingLate",
        firing=buckets("pillarbox_relay_add_to_publish_seconds", "300.0"),
        quiet=buckets("pillarbox_relay_add_to_publish_seconds", "1.0"),
    ),
    Case(
        alert="PillarboxRelayKeysBlocked",
        firing={"pillarbox_relay_blocked_keys": "1+0x120"},
        quiet={"pillarbox_relay_blocked_keys": "5x110 0x10"},
    ),
    Case(
        alert="PillarboxHandlerFailing",
        firing={
            **counter(f"{CONSUMER}_failed_total", 20, **BILLING),
            **counter(f"{CONSUMER}_handled_total", 10, **BILLING),
        },
        quiet={
            **counter(f"{CONSUMER}_failed_total", 5, **BILLING),
            **counter(f"{CONSUMER}_handled_total", 10, **BILLING),
        },
        labels=BILLING,
    ),
    Case(
        alert="PillarboxHandlerFailing",
        firing=counter(f"{CONSUMER}_failed_total", 1, **BILLING),
        quiet=counter(f"{CONSUMER}_handled_total", 1, **BILLING),
        labels=BILLING,
    ),
    Case(
        alert="PillarboxConsumerLate",
        firing=buckets(
            "pillarbox_consumer_add_to_handled_seconds", "900.0", consumer="billing"
        ),
        quiet=buckets(
            "pillarbox_consumer_add_to_handled_seconds", "60.0", consumer="billing"
        ),
        labels={"consumer": "billing"},
    ),
    Case(
        alert="PillarboxConsumerLate",
        firing=buckets(
            "pillarbox_consumer_publish_to_handle_seconds", "900.0", consumer="billing"
        ),
        # The messages were scheduled long ago, and handled once published.
        quiet={
            **buckets(
                "pillarbox_consumer_add_to_handled_seconds", "900.0", consumer="billing"
            ),
            **buckets(
                "pillarbox_consumer_publish_to_handle_seconds",
                "0.1",
                consumer="billing",
            ),
            'pillarbox_consumer_publish_to_handle_seconds_count{consumer="billing"}': (
                "0+60x120"
            ),
        },
        labels={"consumer": "billing"},
    ),
    Case(
        alert="PillarboxConsumerLate",
        firing=buckets(
            "pillarbox_consumer_add_to_handled_seconds", "900.0", consumer="billing"
        ),
        # It is paused, or was until a moment ago.
        quiet={
            **buckets(
                "pillarbox_consumer_add_to_handled_seconds", "900.0", consumer="billing"
            ),
            PAUSED: "1x120",
        },
        labels={"consumer": "billing"},
    ),
    Case(
        alert="PillarboxConsumerKeyBlocked",
        firing={BLOCKED_AGE: "0+60x120"},
        quiet={BLOCKED_AGE: "0+60x120", PAUSED: "1x120"},
        labels={"consumer": "billing"},
    ),
    Case(
        alert="PillarboxConsumerKeyBlocked",
        firing={
            'pillarbox_consumer_blocked_key_age_seconds{consumer="billing"}': "0+60x120"
        },
        quiet={
            'pillarbox_consumer_blocked_key_age_seconds{consumer="billing"}': "60x120"
        },
        labels={"consumer": "billing"},
    ),
    Case(
        alert="PillarboxHandlerOverdue",
        firing={OVERDUE.format("true"): "65+60x120"},
        quiet={OVERDUE.format("false"): "65+60x120"},
        labels={"consumer": "billing", "handler": "bill"},
    ),
    Case(
        alert="PillarboxConnectionLost",
        firing=counter(
            "pillarbox_events_total", 3, event="SourceLost", consumer="billing"
        ),
        quiet=counter(
            "pillarbox_events_total", 30, event="SourceRecovered", consumer="billing"
        ),
        labels={"event": "SourceLost", "consumer": "billing"},
    ),
    Case(
        alert="PillarboxNewDeadLetters",
        firing={LETTERS: "3x110 4x10"},
        quiet={LETTERS: "3x90 2x30"},
        labels=ORIGIN,
    ),
    Case(
        alert="PillarboxNewDeadLetters",
        # The first dead letter: there was no series before.
        firing={LETTERS: "_x110 1x10"},
        quiet={LETTERS: "1x90 _x30"},
        labels=ORIGIN,
    ),
    Case(
        alert="PillarboxError",
        # Of two replicas, one sees what is wrong.
        firing={
            findings("a", check="upkeep", severity="error"): "0x120",
            findings("b", check="upkeep", severity="error"): "1x120",
        },
        quiet={
            findings("a", check="upkeep", severity="error"): "2x100 0x20",
            findings("a", check="upkeep", severity="warning"): "2x120",
        },
        labels=UPKEEP,
    ),
    Case(
        alert="PillarboxWarning",
        firing={findings("a", check="upkeep", severity="warning"): "1x120"},
        quiet={
            findings("a", check="upkeep", severity="warning"): "0x100 1x20",
            findings("a", check="upkeep", severity="unknown"): "1x120",
        },
        labels=UPKEEP,
    ),
    Case(
        alert="PillarboxDatabaseNotMeasured",
        # A consumer's measuring fails or hangs, while a relay measures.
        firing={measured("a"): "0+60x120", measured("b"): "1200x120"},
        quiet={measured("a"): "0+60x120", measured("b"): "0+60x120"},
        labels={"instance": "b"},
    ),
    Case(
        alert="PillarboxDatabaseNotMeasured",
        # Never measured: the name of the database isn't known.
        firing={measured("b", database=""): "0x120"},
        quiet={
            measured("b", database=""): "0x5 stale",
            measured("b"): "_x5 300+60x114",
        },
        labels={"instance": "b"},
    ),
    Case(
        alert="PillarboxDatabaseNotMeasured",
        firing={
            measured("b"): "0+60x120",
            findings("b", check="backlogs", severity="unknown"): "1x120",
        },
        quiet={
            measured("b"): "0+60x120",
            findings("b", check="backlogs", severity="error"): "1x120",
        },
        labels={"instance": "b"},
    ),
]


def promtool(*arguments: str | Path, stdin: str = "") -> str:
    program = shutil.which("promtool")
    assert program is not None, "no promtool on PATH; install it (Debian: prometheus)"
    done = subprocess.run(
        [program, *arguments], input=stdin, capture_output=True, text=True, check=False
    )
    said = done.stdout + done.stderr
    # 3: promtool has complaints about a metric.
    assert done.returncode == 0 or (stdin and done.returncode == 3), said
    return said


def samples() -> set[str]:
    """Return the names under which Prometheus stores pillarbox's metrics."""
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}
    return {
        family.name + end
        for family in registry().collect()
        for end in suffixes.get(family.type, [""])
    }


def expected(case: Case) -> dict[str, Any]:
    rule = ALERTS[case.alert]
    annotations = {
        name: re.sub(r"{{ \$labels\.(\w+) }}", lambda m: case.labels[m[1]], value)
        for name, value in rule["annotations"].items()
    }
    return {
        "exp_labels": {**case.labels, **rule["labels"]},
        "exp_annotations": annotations,
    }


def test_the_rules_are_valid() -> None:
    promtool("check", "rules", RULES)


def test_each_alert_fires_only_when_it_should(tmp_path: Path) -> None:
    suites = []
    for alert, rule in ALERTS.items():
        # Alone, because promtool evaluates all of a file's rules for each test.
        rules = tmp_path / f"{alert}.rules.yaml"
        rules.write_text(yaml.safe_dump({"groups": [{"name": "one", "rules": [rule]}]}))
        tests = [
            {
                "interval": "1m",
                "input_series": [{"series": s, "values": v} for s, v in series.items()],
                "alert_rule_test": [
                    {"eval_time": "2h", "alertname": alert, "exp_alerts": alerts}
                ],
            }
            for case in CASES
            if case.alert == alert
            for series, alerts in ((case.firing, [expected(case)]), (case.quiet, []))
        ]
        suites.append(tmp_path / f"{alert}.test.yaml")
        suites[-1].write_text(
            yaml.safe_dump(
                {
                    "rule_files": [str(rules)],
                    "evaluation_interval": "1m",
                    "tests": tests,
                }
            )
        )
    promtool("test", "rules", *suites)


def test_promtool_accepts_the_metrics(database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        overview = read_overview(connection)
        found = find_quickly(connection, overview)
    metrics = PrometheusEvents(CollectorRegistry())
    observers = Observers(
        [
            metrics,
            RelayMetrics(metrics.registry, metrics.topics, RelayCounts()),
            ConsumerMetrics(
                metrics.registry, metrics.topics, ConsumerCounts("billing")
            ),
            DatabaseMetrics(metrics.registry),
        ]
    )
    about: dict[str, Any] = {"consumer": "billing", "id": uuid7(), "topic": "t"}
    for event in (
        BatchPublished(messages=1, acked=1, seconds=0.1, topics=["t"]),
        MessageHandled(**about, key=None, seconds=0.1, published_at=1.0),
        ProcessMeasured(
            kind="consumer",
            name="billing",
            in_flight=1,
            held=1,
            blocked_keys=1,
            blocked_for=timedelta(seconds=1),
            running_since=datetime.now(UTC),
            running_handler="bill",
        ),
        DatabaseMeasured(overview=overview, findings=found),
    ):
        observers.notify(event)
    text = generate_latest(metrics.registry).decode()
    for family in metrics.registry.collect():
        assert f"\n{family.name}" in text or family.name.startswith("dead_letter_")
    assert promtool("check", "metrics", stdin=text) == ""


def test_every_alert_is_tested() -> None:
    assert {case.alert for case in CASES} == set(ALERTS)


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_has_a_runbook_and_uses_what_exists(
    alert: str,
) -> None:
    rule = ALERTS[alert]
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert rule["annotations"]["summary"].endswith(".")
    page, _, section = rule["annotations"]["runbook_url"].partition("#")
    assert ROOT / page == PAGE
    headings = re.findall(r"^### (\w+)$", PAGE.read_text(), re.MULTILINE)
    assert section in {heading.lower() for heading in headings}
    assert section == alert.lower()
    expression = rule["expr"]
    assert set(re.findall(r"(?:pillarbox|dead_letter)_\w+", expression)) <= samples()
    named = re.findall(r'event=~?"([^"]+)"', expression)
    known = {event.__name__ for event in events()}
    assert {name for names in named for name in names.split("|")} <= known
