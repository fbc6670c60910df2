"""`pillarbox relay`, `pillarbox replay`, and the relay's side of repair."""

from contextlib import AbstractAsyncContextManager
from dataclasses import astuple
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from pillarbox.outbox.administration.sides import RetryOptions
from pillarbox.outbox.cli.command import (
    Broker,
    Codec,
    Database,
    DryRun,
    Duration,
    Key,
    Limit,
    Rate,
    Tenant,
    Topic,
    Until,
    broker_url,
    command,
    database_url,
    duration_option,
    moment_option,
    new_app,
    opened,
)
from pillarbox.outbox.cli.output import progress, write_line, write_table
from pillarbox.outbox.cli.start import Wait
from pillarbox.outbox.cli.supervisor import (
    RETRY_INTERVAL,
    RetryInterval,
    Watched,
    Watching,
    schedule_of,
)
from pillarbox.outbox.dead_letters.retry import Retrier
from pillarbox.outbox.events import Observer
from pillarbox.outbox.observability.database_measure import RELAY
from pillarbox.outbox.payload.payload_codec import load_codec
from pillarbox.outbox.postgres.advisory_lock import MAIN
from pillarbox.outbox.retry import RetryPolicy
from pillarbox.relay.activity import RelayCounts
from pillarbox.relay.config import RelayConfig
from pillarbox.relay.dead_letters.side import SIDE
from pillarbox.relay.events import RelayStarted
from pillarbox.relay.relay import Relay
from pillarbox.relay.renewed_publisher import publisher_of
from pillarbox.relay.replay import (
    ReplayCriteria,
    count_published,
    count_receipts,
    replay_published,
)

if TYPE_CHECKING:
    from pillarbox.outbox.observability.prometheus import PrometheusEvents

_DEFAULT: Final = RelayConfig()
_BATCH: Final = 1000
"""How many messages a replay makes ready in one transaction."""
_PUBLISHED_COLUMNS: Final = ("topic", "messages", "oldest", "newest")

relay_app = new_app()
replay_app = new_app()


ReaderName: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Whose messages to publish; pillarbox readers adds readers.",
    ),
]


def _number(meaning: str) -> Any:
    return typer.Option(metavar="N", help=meaning)


@command(
    relay_app,
    epilog="Exit status: 0 stopped and drained; 2 it could not run; 70 the watchdog "
    "ended it.",
)
def relay(
    *,
    reader: ReaderName = MAIN,
    broker: Broker = None,
    database: Database = None,
    codec: Codec = None,
    batch_size: Annotated[int, _number("Messages in one claim.")] = _DEFAULT.batch_size,
    concurrency: Annotated[
        int, _number("Batches in flight at once.")
    ] = _DEFAULT.concurrency,
    max_payload_bytes: Annotated[
        int,
        _number(
            "A message with a larger payload becomes a dead letter without being "
            "loaded."
        ),
    ] = _DEFAULT.max_payload_bytes,
    lease: Annotated[
        timedelta,
        duration_option(
            help="How long a relay that hangs keeps its share of the keys."
        ),
    ] = Duration.of(_DEFAULT.lease),
    publish_timeout: Annotated[
        timedelta,
        duration_option(
            help="How long a publish may take before the broker is considered "
            "unavailable."
        ),
    ] = Duration.of(_DEFAULT.publish_timeout),
    drain: Annotated[
        timedelta,
        duration_option(help="How long to wait for batches in flight when stopping."),
    ] = Duration.of(_DEFAULT.drain),
    max_attempts: Annotated[
        int,
        _number(
            "Maximum attempts to publish a message before it becomes a dead letter."
        ),
    ] = _DEFAULT.retry.max_attempts,
    strict_order: Annotated[
        bool,
        typer.Option(
            "--strict-order",
            help="Publish one message of a key at a time, for brokers that can refuse "
            "single messages.",
        ),
    ] = False,
    switch_broker: Annotated[
        bool,
        typer.Option(
            "--switch-broker",
            help="Publish to this broker from now on; relays with another one stop "
            "publishing.",
        ),
    ] = False,
    from_now: Annotated[
        bool,
        typer.Option(
            "--from-now",
            help="Start with new messages, if this is the first relay of main; by "
            "default, earlier ones are published, too.",
        ),
    ] = False,
    wait: Wait = None,
    dead_letter_interval: RetryInterval = RETRY_INTERVAL,
    watching: Watching,
) -> None:
    """Publish committed messages until SIGTERM; then drain and exit."""
    config = RelayConfig(
        batch_size=batch_size,
        concurrency=concurrency,
        max_payload_bytes=max_payload_bytes,
        lease=lease,
        publish_timeout=publish_timeout,
        drain=drain,
        strict_order=strict_order,
        retry=RetryPolicy(max_attempts=max_attempts),
        codec=load_codec(codec) if codec else None,
    )
    counts = RelayCounts()

    def metrics(exported: "PrometheusEvents") -> Observer:
        from pillarbox.relay.metrics import RelayMetrics

        return RelayMetrics(exported.registry, exported.topics, counts)

    watched = Watched(
        watching,
        wait=wait,
        started=RelayStarted,
        counts=counts,
        metrics=metrics,
        scope=RELAY,
        database=partial(database_url, database),
    )
    schedule = schedule_of(dead_letter_interval)

    def open_retrier() -> AbstractAsyncContextManager[Retrier]:
        options = RetryOptions(
            database=database_url(database),
            broker=broker_url(broker),
            codec=codec,
            consumer=None,
            schedule=schedule,
        )
        return SIDE.open_retrier(options, watched.notify)

    watched.retry(schedule, open_retrier, schema="outbox", origin=f"relay:{reader}")
    process: Relay

    async def run() -> None:
        nonlocal process
        outbox, url = database_url(database), broker_url(broker)
        process = Relay(
            outbox,
            publisher_of(url),
            config,
            observers=watched.observers,
            reader=reader,
            broker=url,
            switch_broker=switch_broker,
            from_now=from_now,
        )
        await process.run()

    watched.run(run, lambda: process.stop(), config.drain)


@command(replay_app)
def replay(
    *,
    since: Annotated[datetime, moment_option("Added then or later")],
    reader: ReaderName = MAIN,
    until: Until = None,
    topic: Topic = None,
    key: Key = None,
    tenant: Tenant = None,
    limit: Limit = None,
    rate: Rate = None,
    dry_run: DryRun = False,
    database: Database = None,
) -> None:
    """Publish or handle messages again, selected by topic, key and time."""
    choice = ReplayCriteria(
        since=since,
        until=until or datetime.now(UTC),
        topic=topic,
        key=key,
        tenant=tenant,
        max_rows=limit,
        reader=reader,
    )
    rights = "GRANT pillarbox_relay TO its role"
    with opened(database, "replay", rights=rights) as connection:
        found = count_published(connection, choice)
        total = sum(topic.messages for topic in found)
        receipts = count_receipts(connection, choice)
        if receipts is not None:
            write_line(
                f"{reader} is a consumer: it skips {receipts} of these messages, for"
                " which it has receipts here; if its handlers' database is another one,"
                " its receipts are there"
            )
        if dry_run:
            if found:
                write_table(_PUBLISHED_COLUMNS, [astuple(it) for it in found])
            else:
                write_line("no published message matches")
            if limit is not None and limit < total:
                write_line(f"with --limit {limit}, the first {limit} of these")
            return
        with progress(min(total, limit or total)) as show_progress:
            replayed = replay_published(
                connection,
                choice,
                # Don't exceed the rate within a second, either.
                batch_size=min(_BATCH, max(1, int(rate or _BATCH))),
                max_per_second=rate,
                on_batch=show_progress,
            )
    again = "published" if receipts is None else "handled"
    write_line(f"{replayed} replayed: ready to be {again} again")
