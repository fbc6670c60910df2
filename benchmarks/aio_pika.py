"""The relay's rate to RabbitMQ, compared with a relay that uses aio-pika's publish."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.broker_costs import relayed_to
from benchmarks.brokers import BROKERS
from benchmarks.conditions import Conditions, show
from benchmarks.drain import draining
from benchmarks.fill import fill
from benchmarks.measure import Answer, Variant, at_least, measure
from benchmarks.peers.peer import AIO_PIKA
from benchmarks.workload import Workload


def answers(conditions: Conditions) -> Iterator[Answer]:
    workload = Workload(messages=conditions.size(50_000, quick=10_000))
    AIO_PIKA.python()  # installed here, so that no run includes it
    broker = BROKERS["rabbitmq"]

    def with_pika() -> float:
        return relayed_to(broker, conditions, workload)

    def with_aio_pika() -> float:
        with broker.server() as broker_url, conditions.migrated_database() as url:
            fill(url, workload)
            with draining(url, workload.messages, broker_url, peer=AIO_PIKA) as relay:
                return relay.wait().rate

    found = measure(
        Variant(label="pillarbox", run=with_pika),
        Variant(label=AIO_PIKA.label, run=with_aio_pika),
        runs=conditions.runs(),
        on_run=lambda label, figure: show(label, figure, "/s"),
    )
    yield Answer(
        question=f"{broker.label}: against {AIO_PIKA.label}",
        figure=found.ratio(AIO_PIKA.label),
        target=at_least(2.0),
        noise=found.noise,
        detail=(
            f"{workload.messages:,} messages: {found.medians('/s')}; the same relay, "
            "with aio-pika's publish in a gather"
        ),
    )
