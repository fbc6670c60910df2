"""How much memory the relay's process uses while it drains large messages."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.conditions import Conditions, show
from benchmarks.drain import drain
from benchmarks.fill import fill
from benchmarks.measure import Answer, Variant, at_most, measure
from benchmarks.workload import Workload

MEBIBYTE = 1024 * 1024


def answers(conditions: Conditions) -> Iterator[Answer]:
    workload = Workload(
        messages=conditions.size(2_000, quick=200), payload_bytes=MEBIBYTE
    )

    def run() -> float:
        with conditions.migrated_database() as url:
            fill(url, workload)
            return drain(url, workload.messages).peak_mib

    found = measure(
        Variant(label="peak", run=run), runs=conditions.runs(2), on_run=on_run
    )
    yield Answer(
        question=f"memory: relay draining {workload.messages:,} messages of 1 MiB",
        figure=found.median,
        unit="MiB",
        target=at_most(150),
        noise=found.noise,
        detail="highest resident memory of the relay's process, to a null publisher",
    )


def on_run(label: str, figure: float) -> None:
    show(label, figure, "MiB")
