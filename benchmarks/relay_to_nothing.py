"""How fast a full table drains into a null publisher, compared with peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.conditions import Conditions, show
from benchmarks.drain import drain
from benchmarks.fill import fill
from benchmarks.measure import Answer, Variant, at_least, measure
from benchmarks.peers.peer import FASTSTREAM_OUTBOX, TXOUTBOX, Peer
from benchmarks.workload import Workload

TARGETS = {TXOUTBOX: 2.5, FASTSTREAM_OUTBOX: 15.0}


def answers(conditions: Conditions) -> Iterator[Answer]:
    workload = Workload(messages=conditions.size(50_000, quick=10_000))
    pillarbox = Variant(label="pillarbox", run=our_rate(conditions, workload))
    peers = [
        Variant(label=peer.label, run=peer_rate(conditions, workload, peer))
        for peer in TARGETS
    ]
    found = measure(pillarbox, *peers, runs=conditions.runs(), on_run=on_run)
    for peer, bound in TARGETS.items():
        yield Answer(
            question=f"relay to nothing: against {peer.label}",
            figure=found.ratio(peer.label),
            target=at_least(bound),
            noise=found.noise,
            detail=f"{workload.messages:,} messages: {found.medians('/s')}",
        )


def our_rate(conditions: Conditions, workload: Workload) -> Callable[[], float]:
    def run() -> float:
        with conditions.migrated_database() as url:
            fill(url, workload)
            return drain(url, workload.messages).rate

    return run


def peer_rate(
    conditions: Conditions, workload: Workload, peer: Peer
) -> Callable[[], float]:
    peer.python()  # installed here, so that no run includes it

    def run() -> float:
        with conditions.empty_database() as url:
            return peer.drain(url, workload)

    return run


def on_run(label: str, figure: float) -> None:
    show(label, figure, "/s")
