"""How fast a consumer drains an outbox without a broker, compared with two job queues.

pillarbox's consumer writes a receipt for each message, in the handler's transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg

from benchmarks.conditions import Conditions, show
from benchmarks.consuming import BATCHES, NAME, SINGLE, Way, consume
from benchmarks.fill import fill
from benchmarks.measure import Answer, Variant, at_least, measure
from benchmarks.peers.peer import PGQUEUER, PROCRASTINATE
from benchmarks.relay_to_nothing import peer_rate
from benchmarks.workload import TOPIC, Workload
from pillarbox.outbox.administration.connection import administration
from pillarbox.outbox.administration.readers import add_reader
from pillarbox.outbox.errors import OutboxError

TARGETS = {PGQUEUER: 1.5, PROCRASTINATE: 10.0}
UNSETTLED = "SELECT count(*) FROM outbox.unsettled_message WHERE reader = %s"


def answers(conditions: Conditions) -> Iterator[Answer]:
    workload = Workload(messages=conditions.size(20_000, quick=3_000))
    batches, single = (
        Variant(label=f"pillarbox {way.label}", run=our_rate(conditions, workload, way))
        for way in (BATCHES, SINGLE)
    )
    peers = [
        Variant(label=peer.label, run=peer_rate(conditions, workload, peer))
        for peer in TARGETS
    ]
    found = measure(
        batches,
        single,
        *peers,
        runs=conditions.runs(3),
        on_run=lambda label, figure: show(label, figure, "/s"),
    )
    detail = f"{workload.messages:,} messages: {found.medians('/s')}"
    for peer, bound in TARGETS.items():
        yield Answer(
            question=f"postgres source: batches against {peer.label}",
            figure=found.ratio(peer.label),
            target=at_least(bound),
            noise=found.noise,
            detail=detail,
        )
    for peer in TARGETS:
        yield Answer(
            question=f"postgres source: one by one against {peer.label}",
            figure=found.other(single.label).median / found.other(peer.label).median,
            noise=found.noise,
            detail=detail,
        )


def our_rate(
    conditions: Conditions, workload: Workload, way: Way
) -> Callable[[], float]:
    def run() -> float:
        with conditions.migrated_database() as url:
            with administration(url, application_name=NAME) as connection:
                add_reader(connection, NAME, [TOPIC], for_consumer=True)
            fill(url, workload)
            rate = consume(url, url, workload.messages, way)
            with psycopg.connect(url) as connection:
                row = connection.execute(UNSETTLED, (NAME,)).fetchone()
        assert row is not None
        if row[0]:
            raise OutboxError(f"{row[0]} messages were not settled")
        return rate

    return run
