"""The time of importing `add`, compared with what applications import anyway."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable, Iterator

from benchmarks.conditions import Conditions, show
from benchmarks.measure import Answer, Variant, at_most, measure

BOUND = 1.3
OTHERS = ("sqlalchemy", "sqlalchemy.orm, sqlalchemy.dialects.postgresql")


def answers(conditions: Conditions) -> Iterator[Answer]:
    found = measure(
        Variant(label="pillarbox", run=milliseconds("pillarbox, outbox.writer")),
        *(Variant(label=name, run=milliseconds(name)) for name in OTHERS),
        runs=conditions.runs(15),
        on_run=lambda label, figure: show(label, figure, "ms"),
    )
    for name in OTHERS:
        yield Answer(
            question=f"import add: against import {name}",
            figure=found.ratio(name),
            target=at_most(BOUND),
            noise=found.noise,
            detail=f"processor time of a new process: {found.medians('ms')}",
        )


def milliseconds(module: str) -> Callable[[], float]:
    """Measure processor time, since waiting says nothing about the import."""

    def run() -> float:
        before = spent()
        subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
        return (spent() - before) * 1_000

    return run


def spent() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
