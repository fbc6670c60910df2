"""How fast a full table drains into NATS and Redis, compared with faststream-outbox."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.broker_costs import relayed_to
from benchmarks.brokers import BROKERS, Broker
from benchmarks.conditions import Conditions, show
from benchmarks.measure import Answer, Variant, at_least, measure
from benchmarks.peers.peer import FASTSTREAM_OUTBOX
from benchmarks.workload import Workload


def answers(conditions: Conditions) -> Iterator[Answer]:
    workload = Workload(messages=conditions.size(20_000, quick=5_000))
    FASTSTREAM_OUTBOX.python()  # installed here, so that no run includes it
    for name in ("nats", "redis"):
        yield compared(BROKERS[name], conditions, workload)


def compared(broker: Broker, conditions: Conditions, workload: Workload) -> Answer:
    def pillarbox() -> float:
        return relayed_to(broker, conditions, workload)

    def peer() -> float:
        with broker.server() as broker_url, conditions.empty_database() as url:
            return FASTSTREAM_OUTBOX.drain(url, workload, broker_url=broker_url)

    found = measure(
        Variant(label="pillarbox", run=pillarbox),
        Variant(label=FASTSTREAM_OUTBOX.label, run=peer),
        runs=conditions.runs(),
        on_run=lambda label, figure: show(label, figure, "/s"),
    )
    return Answer(
        question=f"{broker.label}: against {FASTSTREAM_OUTBOX.label}",
        figure=found.ratio(FASTSTREAM_OUTBOX.label),
        target=at_least(8.0),
        noise=found.noise,
        detail=f"{workload.messages:,} messages: {found.medians('/s')}",
    )
