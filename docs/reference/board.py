"""The Grafana board of docker/grafana: its panels and their queries.

`make reference` writes the board. Its last row is the runbook: the section about each
alert of docs/runbook.md, so that the remedy is next to the symptom.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

_ROOT: Final = Path(__file__).parent.parent.parent
PAGE: Final = _ROOT / "docker" / "grafana" / "pillarbox.json"
RUNBOOK: Final = _ROOT / "docs" / "runbook.md"
UID: Final = "pillarbox"

_WIDTH: Final = 24
_RUNBOOK_ID: Final = 1000
_DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_CONSUMER: Final = 'consumer=~"$consumer"'
_TOPIC: Final = 'topic=~"$topic"'
_BOTH: Final = f"{_CONSUMER},{_TOPIC}"

Json: TypeAlias = dict[str, Any]
Colour: TypeAlias = Literal["green", "orange", "red", "blue"]
Thresholds: TypeAlias = Mapping[float, Colour]
"""The colour from each value upwards; the first also covers all lower values."""

_GOOD: Final[Thresholds] = {0: "green"}
_NONE_IS_GOOD: Final[Thresholds] = {0: "green", 1: "red"}
_FEW_ARE_BAD: Final[Thresholds] = {0: "green", 1: "orange"}


@dataclass(frozen=True, kw_only=True)
class Query:
    """A query in PromQL, and how its series are named."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel.

    Attributes:
        description: what it shows, and what to do if it looks wrong.
        unit: Grafana's name for the unit.
        runbook: the alerts about it.
        words: the text and colour shown for each value.
        empty: what is shown if there is no series, and why that is fine.
    """

    title: str
    description: str
    queries: Sequence[Query]
    unit: str
    kind: Literal["timeseries", "stat", "table", "state-timeline"] = "timeseries"
    width: int = 8
    height: int = 7
    runbook: Sequence[str] = ()
    thresholds: Thresholds | None = None
    words: Mapping[str, tuple[str, Colour]] | None = None
    empty: str | None = None
    stacked: bool = False
    minimum: float | None = 0


@dataclass(frozen=True, kw_only=True)
class Row:
    """Panels below a heading."""

    title: str
    panels: Sequence[Panel]
    collapsed: bool = False


def _rate(name: str, by: str, where: str = "", legend: str = "") -> Query:
    selected = f"{{{where}}}" if where else ""
    return Query(
        expr=f"sum by ({by}) (rate({name}{selected}[$__rate_interval]))",
        legend=legend or " ".join(f"{{{{{label}}}}}" for label in by.split(", ")),
    )


def _within(
    name: str,
    *shares: float,
    by: str = "",
    where: str = "",
    legend: str = "",
) -> Sequence[Query]:
    """Return quantiles of a histogram: the time within which each share finished."""
    selected = f"{{{where}}}" if where else ""
    labels = f"le, {by}" if by else "le"
    rate = f"sum by ({labels}) (rate({name}_bucket{selected}[$__rate_interval]))"
    named = " ".join(f"{{{{{label}}}}}" for label in by.split(", ") if label)
    return [
        Query(
            expr=f"histogram_quantile({share}, {rate})",
            legend=f"{legend or named} {share:.0%}".strip(),
        )
        for share in shares
    ]


_ANSWER: Final = (
    Panel(
        title="Is all well?",
        description="How many alerts are firing. The list next to it names them; the"
        " row Runbook at the end of this board says what to do about each.",
        kind="stat",
        queries=[
            Query(
                expr='count(ALERTS{alertname=~"Pillarbox.+",alertstate="firing"})'
                " or vector(0)"
            )
        ],
        unit="short",
        thresholds=_NONE_IS_GOOD,
        words={"0": ("All is well", "green")},
        width=4,
        height=6,
    ),
    Panel(
        title="What is wrong",
        description="Alerts that are firing (severity critical first) or pending. Look"
        " up the name in the row Runbook. Empty unless Prometheus has loaded"
        " docker/prometheus/pillarbox.rules.yaml.",
        kind="table",
        queries=[
            Query(
                expr="sort(sum by (severity, alertname, alertstate, topic, consumer,"
                " origin, event, database, check, instance) ("
                'ALERTS{alertname=~"Pillarbox.+"}))'
            )
        ],
        unit="short",
        empty="No alert is firing.",
        width=8,
        height=6,
    ),
    Panel(
        title="Lanes served",
        description="Out of 48. At 0 nothing is published: is a relay running? Below"
        " 48, messages of the other lanes wait: LanesWithheld in a relay's log names"
        " the session that holds their locks.",
        kind="stat",
        queries=[Query(expr="sum(pillarbox_relay_lanes) or vector(0)")],
        unit="short",
        thresholds={0: "red", 1: "orange", 48: "green"},
        runbook=["PillarboxNoRelay", "PillarboxLanesUnserved"],
        width=3,
        height=3,
    ),
    Panel(
        title="Broker",
        description="Whether every relay reaches its broker. If not: check the broker,"
        " the network and the credentials; BrokerLost in the log has the reason."
        " Nothing is lost, and relays continue on their own.",
        kind="stat",
        queries=[Query(expr="max(pillarbox_relay_breaker_open)")],
        unit="short",
        thresholds=_NONE_IS_GOOD,
        words={"0": ("Reachable", "green"), "1": ("Unavailable", "red")},
        runbook=["PillarboxBrokerUnavailable"],
        empty="No relay",
        width=3,
        height=3,
    ),
    Panel(
        title="Published within",
        description="Half of the messages of the last minutes were published within"
        " this time of being added, or of the time they were scheduled for. If it"
        " grows, compare claim, publish and settle in the row Relay.",
        kind="stat",
        queries=_within("pillarbox_relay_add_to_publish_seconds", 0.5),
        unit="s",
        thresholds={0: "green", 10: "orange", 60: "red"},
        runbook=["PillarboxPublishingLate"],
        empty="Nothing published",
        width=3,
        height=3,
    ),
    Panel(
        title="Handled within",
        description="Half of the messages of the last minutes were handled within this"
        " time of being added, by the slowest consumer. Scheduled and replayed"
        " messages lengthen it harmlessly. If it grows for another reason, the row"
        " Consumer shows whether messages wait at the broker or in the handler.",
        kind="stat",
        queries=[
            Query(
                expr="max(histogram_quantile(0.5, sum by (le, consumer) (rate("
                f"pillarbox_consumer_add_to_handled_seconds_bucket{{{_CONSUMER}}}"
                "[$__rate_interval]))))"
            )
        ],
        unit="s",
        thresholds={0: "green", 60: "orange", 300: "red"},
        runbook=["PillarboxConsumerLate"],
        empty="Nothing handled",
        width=3,
        height=3,
    ),
    Panel(
        title="Pending dead letters",
        description="Dead-lettered messages that wait for a decision. Fix the cause,"
        " then retry or discard them: pillarbox dead-letters list --since 1h.",
        kind="stat",
        queries=[
            Query(expr="sum(max by (schema, origin) (dead_letter_total)) or vector(0)")
        ],
        unit="short",
        thresholds={0: "green", 1: "orange", 101: "red"},
        runbook=["PillarboxNewDeadLetters"],
        width=3,
        height=3,
    ),
    Panel(
        title="Blocked keys",
        description="Keys whose first message waits for its retry, so that later ones"
        " wait, too. pillarbox blocked lists those of relays and names the consumers"
        " that have any.",
        kind="stat",
        queries=[
            Query(
                expr="(sum(pillarbox_relay_blocked_keys) or vector(0)) +"
                " (sum(pillarbox_consumer_blocked_keys) or vector(0))"
            )
        ],
        unit="short",
        thresholds=_FEW_ARE_BAD,
        runbook=["PillarboxRelayKeysBlocked", "PillarboxConsumerKeyBlocked"],
        width=3,
        height=3,
    ),
    Panel(
        title="Oldest message that is due",
        description="How long it has waited in the outbox. If it grows by a minute per"
        " minute, no relay publishes it. pillarbox status says why.",
        kind="stat",
        queries=[Query(expr="max(pillarbox_outbox_oldest_waiting_seconds)")],
        unit="s",
        thresholds={0: "green", 60: "orange", 900: "red"},
        runbook=["PillarboxError"],
        empty="Nothing waits",
        width=3,
        height=3,
    ),
    Panel(
        title="pillarbox status",
        description="How many errors and warnings it reports, as far as relays and"
        " consumers can see. It names each, and what to do about it.",
        kind="stat",
        queries=[
            Query(
                expr="sum(max by (database, check, severity) (pillarbox_findings))"
                " or vector(0)"
            )
        ],
        unit="short",
        thresholds=_FEW_ARE_BAD,
        runbook=["PillarboxError", "PillarboxWarning"],
        words={"0": ("Nothing found", "green")},
        width=3,
        height=3,
    ),
)

_RELAY: Final = (
    Panel(
        title="Published by topic",
        description="Messages per second that the broker accepted. Zero while messages"
        " wait means that no relay is publishing: check Lanes served and Broker.",
        queries=[_rate("pillarbox_relay_messages_published_total", "topic", _TOPIC)],
        unit="mps",
        runbook=["PillarboxNoRelay"],
        stacked=True,
    ),
    Panel(
        title="Refused by topic",
        description="Refusals per second after which a message is retried. pillarbox"
        " blocked lists the messages with the broker's reason: usually the topic"
        " doesn't exist, the message is too large, or a privilege is missing.",
        queries=[_rate("pillarbox_relay_messages_refused_total", "topic", _TOPIC)],
        unit="mps",
        runbook=["PillarboxMessagesRefused"],
        stacked=True,
    ),
    Panel(
        title="Add to publish",
        description="Time from adding a message, or from the time it was scheduled for"
        " or replayed, until the broker accepted it. If it grows, the longest of"
        " claim, publish and settle is the bottleneck; if none is long, start another"
        " relay.",
        queries=_within("pillarbox_relay_add_to_publish_seconds", 0.5, 0.95, 0.99),
        unit="s",
        runbook=["PillarboxPublishingLate"],
    ),
    Panel(
        title="Time to claim, publish and settle a batch",
        description="95 % of batches took no longer. If publish is long, the broker is"
        " slow: raise --concurrency if it has capacity. If claim or settle is long,"
        " the database is slow: pillarbox doctor names long transactions.",
        queries=[
            *_within("pillarbox_relay_claim_duration_seconds", 0.95, legend="claim"),
            *_within(
                "pillarbox_relay_publish_duration_seconds", 0.95, legend="publish"
            ),
            *_within("pillarbox_relay_settle_duration_seconds", 0.95, legend="settle"),
        ],
        unit="s",
        runbook=["PillarboxPublishingLate"],
    ),
    Panel(
        title="Lanes by relay",
        description="Relays share the 48 lanes. While the sum is below 48, messages of"
        " some keys wait; that is normal for a short time while a relay starts or"
        " stops.",
        queries=[
            Query(
                expr="sum by (instance) (pillarbox_relay_lanes)", legend="{{instance}}"
            )
        ],
        unit="short",
        runbook=["PillarboxLanesUnserved"],
        stacked=True,
    ),
    Panel(
        title="Broker as each relay sees it",
        description="If only one relay can't reach the broker, check its host.",
        kind="state-timeline",
        queries=[
            Query(
                expr="max by (instance) (pillarbox_relay_breaker_open)",
                legend="{{instance}}",
            )
        ],
        unit="short",
        thresholds=_NONE_IS_GOOD,
        words={"0": ("reachable", "green"), "1": ("unavailable", "red")},
        runbook=["PillarboxBrokerUnavailable"],
        minimum=None,
    ),
    Panel(
        title="Blocked keys by relay",
        description="Keys whose first message was refused and waits for its retry; the"
        " later ones of the key wait behind it. pillarbox blocked lists them.",
        queries=[
            Query(
                expr="sum by (instance) (pillarbox_relay_blocked_keys)",
                legend="{{instance}}",
            )
        ],
        unit="short",
        runbook=["PillarboxRelayKeysBlocked"],
        stacked=True,
    ),
    Panel(
        title="Dead-lettered by the relay",
        description="Messages per second that the broker refused for the last time, or"
        " whose row can't be read. They are dead letters of the outbox: fix the cause,"
        " then run pillarbox dead-letters retry --side outbox.",
        queries=[
            _rate("pillarbox_relay_messages_dead_lettered_total", "topic", _TOPIC)
        ],
        unit="mps",
        runbook=["PillarboxNewDeadLetters"],
        stacked=True,
    ),
    Panel(
        title="Connections lost",
        description="Failed attempts to connect. DatabaseLost means the relay's"
        " database, HandlerDatabaseLost that of a consumer's handlers, SourceLost a"
        " consumer's broker. The log has the reason. Nothing is lost.",
        queries=[
            Query(
                expr="sum by (event, consumer) (increase("
                'pillarbox_events_total{event=~".+Lost"}[$__rate_interval]))'
                ' or label_replace(vector(0), "event", "none", "", "")',
                legend="{{event}} {{consumer}}",
            )
        ],
        unit="short",
        runbook=["PillarboxConnectionLost"],
    ),
)


def _consumed(name: str) -> Sequence[Query]:
    name = f"pillarbox_consumer_messages_{name}_total"
    return [_rate(name, "consumer, topic", _BOTH)]


_CONSUMERS: Final = (
    Panel(
        title="Handled by consumer and topic",
        description="Messages per second whose effects and receipt are committed. If"
        " it is zero while the relay publishes, check whether the consumer is running"
        " and reaches its broker.",
        queries=_consumed("handled"),
        unit="mps",
        stacked=True,
    ),
    Panel(
        title="Failed",
        description="Handler calls per second that raised and will be retried."
        " HandlerFailed in the log has the reason and, once per message, the stack"
        " trace. If more fail than are handled, something that the handler needs is"
        " down, or a release is faulty: roll it back.",
        queries=_consumed("failed"),
        unit="mps",
        runbook=["PillarboxHandlerFailing"],
        stacked=True,
    ),
    Panel(
        title="Retried",
        description="Retries per second: after a failure, or because the handler"
        " raised RetryLater.",
        queries=_consumed("retried"),
        unit="mps",
        runbook=["PillarboxHandlerFailing"],
        stacked=True,
    ),
    Panel(
        title="Duplicates",
        description="Messages per second that arrived again after they were handled,"
        " and were skipped. Some are normal after a restart or an outage; a steady"
        " stream means that acks are lost, or that somebody is replaying messages.",
        queries=_consumed("duplicate"),
        unit="mps",
        stacked=True,
    ),
    Panel(
        title="Dead-lettered by the consumer",
        description="Messages per second that became dead letters of the inbox. Fix"
        " the cause, then run pillarbox dead-letters retry --side inbox.",
        queries=_consumed("dead_lettered"),
        unit="mps",
        runbook=["PillarboxNewDeadLetters"],
        stacked=True,
    ),
    Panel(
        title="Handler time",
        description="Time to handle a message and commit, if that succeeded. If it"
        " grew, check what the handler calls: its database, other services. One that"
        " hangs isn't here: HandlerOverdue in the log names it.",
        queries=_within(
            "pillarbox_consumer_handler_duration_seconds",
            *(0.5, 0.95),
            by="consumer",
            where=_BOTH,
        ),
        unit="s",
        runbook=["PillarboxConsumerLate", "PillarboxHandlerOverdue"],
    ),
    Panel(
        title="Publish to handle: the consumer's lag",
        description="How long messages wait at the broker. If it grows, the consumer"
        " is too slow: raise max_in_flight or start another replica. RabbitMQ doesn't"
        " say when a message was published, so there it is empty.",
        queries=_within(
            "pillarbox_consumer_publish_to_handle_seconds",
            *(0.5, 0.95),
            by="consumer",
            where=_CONSUMER,
        ),
        unit="s",
        runbook=["PillarboxConsumerLate"],
    ),
    Panel(
        title="Add to handled",
        description="The total time of a message, from adding it until it was handled."
        " A scheduled or replayed message also counts from when it was added, because"
        " a consumer doesn't know that it was.",
        queries=_within(
            "pillarbox_consumer_add_to_handled_seconds",
            *(0.5, 0.95),
            by="consumer",
            where=_CONSUMER,
        ),
        unit="s",
        runbook=["PillarboxConsumerLate"],
    ),
    Panel(
        title="In flight and held",
        description="Handlers that are running, and messages that were fetched and are"
        " not settled, those in flight included. If in flight stays at max_in_flight,"
        " the consumer is at its limit.",
        queries=[
            Query(
                expr="sum by (consumer) ("
                f"pillarbox_consumer_{name}_messages{{{_CONSUMER}}})",
                legend=f"{{{{consumer}}}} {legend}",
            )
            for name, legend in (("in_flight", "in flight"), ("held", "held"))
        ],
        unit="short",
        runbook=["PillarboxConsumerLate"],
    ),
    Panel(
        title="Blocked keys by consumer",
        description="Keys whose first message fails and waits for its retry; the later"
        " ones of the key wait behind it. HandlerFailed in the log names the message.",
        queries=[
            Query(
                expr="sum by (consumer) ("
                f"pillarbox_consumer_blocked_keys{{{_CONSUMER}}})",
                legend="{{consumer}}",
            )
        ],
        unit="short",
        runbook=["PillarboxConsumerKeyBlocked"],
        stacked=True,
    ),
    Panel(
        title="Longest blocked key",
        description="For how long the first message of a key has been waiting; absent"
        " while no key is blocked. After an hour, see why it fails: HandlerFailed in"
        " the log has the reason.",
        queries=[
            Query(
                expr="max by (consumer) (pillarbox_consumer_blocked_key_age_seconds"
                f"{{{_CONSUMER}}})",
                legend="{{consumer}}",
            )
        ],
        unit="s",
        runbook=["PillarboxConsumerKeyBlocked"],
        empty="No key is blocked.",
    ),
)

_LETTERS: Final = (
    Panel(
        title="Pending by origin",
        description="Which consumer or publisher dead-lettered them. More than 100 of"
        " one origin probably share one cause: retry one first, then all that share"
        " it.",
        queries=[
            Query(
                expr="max by (schema, origin) (dead_letter_total)",
                legend="{{schema}} {{origin}}",
            )
        ],
        unit="short",
        runbook=["PillarboxNewDeadLetters"],
        stacked=True,
        width=12,
    ),
    Panel(
        title="Oldest pending",
        description="If over a day, the schedule has retried it without success."
        " pillarbox dead-letters list --until 1d shows it: fix its cause, or"
        " discard it with a reason.",
        queries=[
            Query(
                expr="max by (schema, origin) (dead_letter_age_seconds)",
                legend="{{schema}} {{origin}}",
            )
        ],
        unit="s",
        thresholds={0: "green", 86400: "red"},
        runbook=["PillarboxWarning"],
        empty="No dead letter is pending.",
        width=12,
    ),
)

_DATABASE: Final = (
    Panel(
        title="Findings of pillarbox status",
        description="What is wrong by check, as far as relays and consumers can see:"
        " messages that wait for too long, the upkeep, partitions, dead letters, old"
        " transactions. pillarbox status names each, and what to do about it.",
        queries=[
            Query(
                expr="max by (check, severity) (pillarbox_findings)"
                ' or label_replace(vector(0), "check", "none", "", "")',
                legend="{{severity}} {{check}}",
            )
        ],
        unit="short",
        thresholds=_NONE_IS_GOOD,
        runbook=["PillarboxError", "PillarboxWarning"],
    ),
    Panel(
        title="Backlog",
        description="Messages that are not settled: those that are due, scheduled,"
        " refused or blocked. pillarbox status shows them by priority, topic and"
        " tenant. Relays measure it.",
        queries=[
            Query(expr="max(pillarbox_outbox_backlog_messages)", legend="messages")
        ],
        unit="short",
    ),
    Panel(
        title="Oldest message that is due",
        description="How long it has waited. If over 15 minutes, no relay publishes"
        " it, or relays are slower than the writers. pillarbox status says which.",
        queries=[
            Query(expr="max(pillarbox_outbox_oldest_waiting_seconds)", legend="waits")
        ],
        unit="s",
        thresholds={0: "green", 900: "red"},
        runbook=["PillarboxError"],
    ),
    Panel(
        title="Last measurement",
        description="How long ago a process measured the database; the other panels of"
        " this row show what it found. If over 10 minutes, they are blind:"
        " DatabaseNotMeasured in the relays' logs has the reason.",
        queries=[
            Query(
                expr="time() - max(pillarbox_database_measured_timestamp_seconds)",
                legend="ago",
            )
        ],
        unit="s",
        thresholds={0: "green", 600: "red"},
        runbook=["PillarboxDatabaseNotMeasured"],
    ),
)

ROWS: Final = (
    Row(title="Relay", panels=_RELAY),
    Row(title="Consumer", panels=_CONSUMERS),
    Row(title="Dead letters", panels=_LETTERS),
    Row(title="Database", panels=_DATABASE),
)


def runbook() -> Mapping[str, str]:
    """Return the section of docs/runbook.md about each alert."""
    _, _, alerts = RUNBOOK.read_text().partition("\n## By alert\n")
    sections = re.split(r"^### (\w+)\n", alerts, flags=re.MULTILINE)[1:]
    named = zip(sections[::2], sections[1::2], strict=True)
    return {
        # Its links lead to other pages, which Grafana doesn't have.
        name: re.sub(
            r"\[([^\]]*)\]\([^)]*\)", r"\1", text.partition("\n## ")[0]
        ).strip()
        for name, text in named
    }


def page() -> str:
    """Return the whole board."""
    board = {
        "uid": UID,
        "title": "pillarbox",
        "description": "The outbox, its relays, and the consumers of the inbox."
        " Generated by `make reference`; see docs/monitoring.md.",
        "tags": ["pillarbox"],
        "editable": True,
        "schemaVersion": 41,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": [_annotation()]},
        "templating": {"list": list(_variables())},
        "panels": list(_panels()),
    }
    return json.dumps(board, indent=1, ensure_ascii=False) + "\n"


def _annotation() -> Json:
    return {
        "name": "Alerts",
        "datasource": _DATASOURCE,
        "enable": True,
        "hide": False,
        "iconColor": "red",
        "expr": 'ALERTS{alertname=~"Pillarbox.+",alertstate="firing"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{topic}} {{consumer}} {{origin}}",
    }


def _variables() -> Iterator[Json]:
    yield {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "hide": 0,
    }
    for name, metric in (
        ("topic", "pillarbox_relay_messages_published_total"),
        ("consumer", "pillarbox_consumer_messages_handled_total"),
    ):
        query = f"label_values({metric}, {name})"
        yield {
            "name": name,
            "label": name.capitalize(),
            "type": "query",
            "datasource": _DATASOURCE,
            "query": {"query": query, "refId": f"all-{name}s"},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
            "hide": 0,
        }
    # For a Prometheus that monitors several installations.
    yield {
        "name": "filter",
        "label": "Filter",
        "type": "adhoc",
        "datasource": _DATASOURCE,
        "hide": 0,
    }


def _panels() -> Iterator[Json]:
    numbers = iter(range(1, _RUNBOOK_ID))
    y, placed = _placed(_ANSWER, numbers, 0)
    yield from placed
    for row in ROWS:
        yield _heading(row.title, next(numbers), y)
        y, placed = _placed(row.panels, numbers, y + 1)
        yield from placed
    texts = [
        {
            "id": _RUNBOOK_ID + number,
            "type": "text",
            "title": name,
            "description": "The section of docs/runbook.md about this alert.",
            "gridPos": {
                "x": 12 * (number % 2),
                "y": y + 1 + 9 * (number // 2),
                "w": 12,
                "h": 9,
            },
            "options": {"mode": "markdown", "content": text},
        }
        for number, (name, text) in enumerate(runbook().items())
    ]
    yield {
        **_heading("Runbook", _RUNBOOK_ID - 1, y),
        "collapsed": True,
        "panels": texts,
    }


def _heading(title: str, number: int, y: int) -> Json:
    return {
        "id": number,
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": {"x": 0, "y": y, "w": _WIDTH, "h": 1},
        "panels": [],
    }


def _placed(
    panels: Sequence[Panel], numbers: Iterator[int], y: int
) -> tuple[int, list[Json]]:
    """Place each panel as high up and as far left as there is room, as Grafana does."""
    heights = [y] * _WIDTH
    placed = []
    for panel in panels:
        x = min(
            range(_WIDTH - panel.width + 1),
            key=lambda at: (max(heights[at : at + panel.width]), at),
        )
        top = max(heights[x : x + panel.width])
        heights[x : x + panel.width] = [top + panel.height] * panel.width
        at = {"x": x, "y": top, "w": panel.width, "h": panel.height}
        placed.append({**_drawn(panel, next(numbers)), "gridPos": at})
    return max(heights), placed


def _drawn(panel: Panel, number: int) -> Json:
    is_graph = panel.kind in {"timeseries", "state-timeline"}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "links": [_link(alert) for alert in panel.runbook],
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": _DATASOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
                "format": "table" if panel.kind == "table" else "time_series",
                "range": is_graph,
                "instant": not is_graph,
            }
            for at, query in enumerate(panel.queries)
        ],
        "fieldConfig": {"defaults": _field(panel), "overrides": []},
        "options": _OPTIONS[panel.kind],
        **({"transformations": _TABLE} if panel.kind == "table" else {}),
    }


def _link(alert: str) -> Json:
    number = _RUNBOOK_ID + list(runbook()).index(alert)
    return {
        "title": f"{alert}: what to do",
        "type": "link",
        "url": f"/d/{UID}?viewPanel={number}",
        "icon": "",
        "tooltip": "",
        "tags": [],
        "asDropdown": False,
        "targetBlank": False,
        "includeVars": True,
        "keepTime": True,
    }


def _field(panel: Panel) -> Json:
    steps = [
        # The first step covers every value below the second.
        {"value": at if number else None, "color": colour}
        for number, (at, colour) in enumerate((panel.thresholds or _GOOD).items())
    ]
    field: Json = {
        "unit": panel.unit,
        "color": {
            "mode": "palette-classic" if panel.kind == "timeseries" else "thresholds"
        },
        "thresholds": {"mode": "absolute", "steps": steps},
        "mappings": [],
    }
    if panel.minimum is not None:
        field["min"] = panel.minimum
    if panel.empty is not None:
        field["noValue"] = panel.empty
    if panel.words is not None:
        words = {
            value: {"text": text, "color": colour, "index": index}
            for index, (value, (text, colour)) in enumerate(panel.words.items())
        }
        field["mappings"] = [{"type": "value", "options": words}]
    if panel.kind == "timeseries":
        field["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 20 if panel.stacked else 0,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "dashed" if panel.thresholds else "off"},
        }
    return field


_LAST: Final = {"calcs": ["lastNotNull"], "fields": "", "values": False}
_TABLE: Final = [
    {
        "id": "organize",
        "options": {"excludeByName": {"Time": True, "Value": True}},
    }
]
_OPTIONS: Final[Mapping[str, Json]] = {
    "timeseries": {
        "legend": {
            "displayMode": "list",
            "placement": "bottom",
            "showLegend": True,
            "calcs": [],
        },
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "reduceOptions": _LAST,
        "colorMode": "background",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "textMode": "value",
        "wideLayout": True,
    },
    "table": {"showHeader": True, "cellHeight": "sm"},
    "state-timeline": {
        "showValue": "auto",
        "rowHeight": 0.9,
        "mergeValues": True,
        "legend": {
            "displayMode": "list",
            "placement": "bottom",
            "showLegend": False,
            "calcs": [],
        },
        "tooltip": {"mode": "single", "sort": "none"},
    },
}
