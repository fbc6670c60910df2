"""Processor time of a short command, against importing psycopg and Typer alone.

Each run is a process of its own, from its start to its end; what the database does for
it is not counted. Tests assert which modules a command imports.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Final

from benchmarks.conditions import Conditions, show
from benchmarks.measure import Answer, Variant, at_most, measure
from pillarbox.outbox.cli.command import DATABASE_VARIABLE
from pillarbox.outbox.message_id import uuid7

BARE: Final = ("-c", "import psycopg, typer")
TARGET: Final = 2.0


def answers(conditions: Conditions) -> Iterator[Answer]:
    with conditions.migrated_database() as url:
        for command in ("--help", "status", f"trace {uuid7()}"):
            found = measure(
                Variant(
                    label=command,
                    run=partial(
                        processor_time, url, "-m", "pillarbox", *command.split()
                    ),
                ),
                Variant(label="imports", run=partial(processor_time, url, *BARE)),
                runs=conditions.runs(15),
                on_run=lambda label, figure: show(label, figure, "ms"),
            )
            yield Answer(
                question=f"pillarbox {command.split()[0]}, against the imports",
                figure=found.ratio("imports"),
                target=at_most(TARGET),
                noise=found.noise,
                detail=found.medians("ms"),
            )


def processor_time(url: str, *arguments: str) -> float:
    """Return the milliseconds that a Python process computes."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, DATABASE_VARIABLE: url},
        stdout=subprocess.DEVNULL,
    )
    _, _, used = os.wait4(process.pid, 0)
    process.returncode = 0  # reaped
    return (used.ru_utime + used.ru_stime) * 1_000
