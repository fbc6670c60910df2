"""What observers cost: a relay and a consumer with all of them, against none.

The observers are those of `pillarbox relay` and `pillarbox consume` with metrics and
with traces: by OpenTelemetry's API alone, and by its SDK. Every message carries a trace
context; first one in a hundred is sampled, then all are. Each run is a process of its
own, `python -m benchmarks.observers`. It also reports its processor time, which other
work on the machine disturbs less than the rate. No run is long enough to measure the
database, which takes at most a 50th of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psycopg
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from typing_extensions import override

from benchmarks.batch_handlers import TABLE, handled
from benchmarks.conditions import Conditions, show
from benchmarks.consuming import BATCHES, NAME, SINGLE, WAYS
from benchmarks.drain import REPOSITORY, run
from benchmarks.fill import fill
from benchmarks.measure import (
    Answer,
    Measurement,
    Series,
    Target,
    Variant,
    at_most,
    measure,
)
from benchmarks.null_publisher import NullPublisher
from benchmarks.workload import TOPIC, Workload
from pillarbox.inbox.consuming.activity import ConsumerCounts
from pillarbox.inbox.consuming.blocked_keys import BlockedKeys
from pillarbox.inbox.consuming.metrics import ConsumerMetrics
from pillarbox.inbox.events import ConsumerStarted
from pillarbox.outbox.errors import OutboxError
from pillarbox.outbox.events import Observer
from pillarbox.outbox.message import Message
from pillarbox.outbox.observability.health import Health
from pillarbox.outbox.observability.logging import LogEvents
from pillarbox.outbox.observability.opentelemetry import instrument
from pillarbox.outbox.observability.prometheus import DatabaseMetrics, PrometheusEvents
from pillarbox.relay.activity import RelayCounts
from pillarbox.relay.events import RelayStarted
from pillarbox.relay.metrics import RelayMetrics

NONE, NO_SDK, SOME, EVERY = "none", "all, no SDK", "all", "all, every trace"
SHARES = {NO_SDK: 0.01, SOME: 0.01, EVERY: 1.0}
RELAY = "relay"
TARGETS: Mapping[str, Target | None] = {
    NO_SDK: at_most(1.05),
    SOME: at_most(1.05),
    EVERY: None,
}


class Nowhere(SpanExporter):
    """Discards every span."""

    @override
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def answers(conditions: Conditions) -> Iterator[Answer]:
    # Enough to make the start-up time negligible.
    sizes = {
        RELAY: conditions.size(100_000, quick=20_000),
        BATCHES.label: conditions.size(40_000, quick=5_000),
        SINGLE.label: conditions.size(10_000, quick=2_000),
    }
    for process, size in sizes.items():
        workload = Workload(messages=size)
        what = process if process == RELAY else f"consumer, {process}"
        taken: dict[str, list[float]] = defaultdict(list)
        found = measure(
            *(
                Variant(
                    label=label, run=rate(conditions, workload, process, label, taken)
                )
                for label in (NONE, *TARGETS)
            ),
            runs=conditions.runs(9),
            on_run=lambda label, figure: show(label, figure, "/s"),
        )
        processor = per_processor_second(taken)
        for label, target in TARGETS.items():
            yield Answer(
                question=f"observers: {what}, none against {label}",
                figure=found.ratio(label),
                target=target,
                noise=found.noise,
                detail=f"{size:,} messages: {found.medians('/s')}",
            )
            yield Answer(
                question=f"observers: {what}, none against {label}: processor",
                figure=processor.ratio(label),
                target=target,
                noise=processor.noise,
                detail="messages for a second of a processor, in the process:"
                f" {processor.medians('')}",
            )


def per_processor_second(taken: Mapping[str, Sequence[float]]) -> Measurement:
    """Compare the messages per second of processor time."""
    # The subject ran first and last in each turn.
    turns = taken[NONE]
    return Measurement(
        subject=Series(label=NONE, figures=tuple(turns[::2])),
        again=Series(label=NONE, figures=tuple(turns[1::2])),
        others=tuple(
            Series(label=label, figures=tuple(taken[label])) for label in TARGETS
        ),
    )


def rate(
    conditions: Conditions,
    workload: Workload,
    process: str,
    label: str,
    taken: dict[str, list[float]],
) -> Callable[[], float]:
    """Measure the messages per second of a process with these observers.

    Args:
        taken: receives the messages per second of processor time.
    """

    def run_one() -> float:
        with conditions.migrated_database() as url:
            if process == RELAY:
                fill(url, workload, headers_of(SHARES.get(label, SHARES[SOME])))
            else:
                with psycopg.connect(url) as connection:
                    connection.execute(TABLE)
            command = [sys.executable, "-m", "benchmarks.observers", process, label]
            done = subprocess.run(
                [*command, url, str(workload.messages)],
                cwd=REPOSITORY,
                check=False,
                stdout=subprocess.PIPE,
                text=True,
            )
        if done.returncode:
            raise OutboxError(f"the {process} ended with {done.returncode}")
        seconds, processor = json.loads(done.stdout)
        taken[label].append(workload.messages / processor)
        return workload.messages / float(seconds)

    return run_one


def headers_of(share: float) -> Callable[[int], Mapping[str, str]]:
    """Return headers by message number: each starts a trace, and a share is sampled."""
    every = round(1 / share)

    def headers(number: int) -> Mapping[str, str]:
        flags = "00" if number % every else "01"
        return {"traceparent": f"00-{number + 1:032x}-{number + 1:016x}-{flags}"}

    return headers


def observers(process: str, label: str) -> list[Observer]:
    """Return all observers; their logs and spans are discarded."""
    nowhere = Path("/dev/null").open("w")  # noqa: SIM115 (as long as the process)
    logging.basicConfig(level=logging.INFO, stream=nowhere)
    if label == NO_SDK:
        instrument()
    else:
        sampler = ParentBased(TraceIdRatioBased(SHARES[label]))
        provider = TracerProvider(sampler=sampler)
        provider.add_span_processor(BatchSpanProcessor(Nowhere()))
        instrument(tracer_provider=provider)
    metrics = PrometheusEvents()
    watching: list[Observer] = [LogEvents(), metrics]
    relay, consumer = RelayCounts(), ConsumerCounts(NAME)
    if process == RELAY:
        watching += [
            RelayMetrics(metrics.registry, metrics.topics, relay),
            DatabaseMetrics(metrics.registry),
            relay,
            Health(RelayStarted),
        ]
    else:
        watching += [
            ConsumerMetrics(metrics.registry, metrics.topics, consumer),
            consumer,
            BlockedKeys(),
            Health(ConsumerStarted),
        ]
    return watching


async def main(
    process: str, label: str, url: str, messages: int
) -> tuple[float, float]:
    """Do the work; return its elapsed time and its processor time, in seconds."""
    share = SHARES.get(label)
    watching = [] if share is None else observers(process, label)
    if process == RELAY:
        began = time.process_time()
        drained = await run(url, NullPublisher(), messages, watching)
        return drained.seconds, time.process_time() - began
    headers = headers_of(SHARES[SOME] if share is None else share)
    prepared = [
        Message(TOPIC, body, key=key, headers=headers(number))
        for number, (key, body) in enumerate(Workload(messages=messages))
    ]
    began = time.process_time()
    seconds = await handled(url, prepared, WAYS[process], watching)
    return seconds, time.process_time() - began


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("process", choices=[RELAY, *WAYS])
    parser.add_argument("label", choices=[NONE, *SHARES])
    parser.add_argument("url")
    parser.add_argument("messages", type=int)
    given = parser.parse_args()
    took = asyncio.run(main(given.process, given.label, given.url, given.messages))
    print(json.dumps(took), flush=True)
