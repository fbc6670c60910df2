"""How fast a consumer drains the `postgres` broker, compared with two job queues.

pillarbox's consumer writes a receipt for each message, in the handler's transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import islice

import psycopg

from benchmarks.conditions import Conditions, show
from benchmarks.consuming import BATCHES, NAME, SINGLE, Way, consume
from benchmarks.measure import Answer, Variant, at_least, measure
from benchmarks.peers.peer import PGQUEUER, PROCRASTINATE
from benchmarks.relay_to_nothing import peer_rate
from benchmarks.workload import TOPIC, Workload
from outbox.errors import OutboxError
from outbox.message import Message
from relay.publishers.postgres import PostgresPublisher
from tests.fixtures.urls import copy_of

TARGETS = {PGQUEUER: 1.5, PROCRASTINATE: 10.0}
FILL_BATCH = 500
SUBSCRIBE = "INSERT INTO inbox.subscription VALUES (%s, %s)"
UNACKED = "SELECT count(*) FROM inbox.delivery_status WHERE acked_at IS NULL"


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
        with (
            conditions.migrated_database() as url,
            psycopg.connect(url, autocommit=True) as connection,
        ):
            connection.execute(SUBSCRIBE, (NAME, TOPIC))
            asyncio.run(publish(url, workload))
            connection.execute("VACUUM ANALYZE inbox.message")
            rate = consume(url, url, workload.messages, way)
            row = connection.execute(UNACKED).fetchone()
        assert row is not None
        if row[0]:
            raise OutboxError(f"{row[0]} deliveries were not acked")
        return rate

    return run


async def publish(url: str, workload: Workload) -> None:
    messages = iter([Message(TOPIC, payload, key=key) for key, payload in workload])
    async with PostgresPublisher(copy_of(url)) as publisher:
        while batch := list(islice(messages, FILL_BATCH)):
            await publisher.publish(batch)
