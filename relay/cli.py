"""`pillarbox relay`, `pillarbox replay`, and the relay's side of repair."""

import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any, Final, cast

import typer

from outbox.administration.connection import administration
from outbox.administration.sides import RetryOptions, Side
from outbox.brokers.plugins import implementation
from outbox.cli.command import (
    Broker,
    Codec,
    Database,
    Duration,
    Json,
    broker_url,
    command,
    database_url,
    duration_option,
    new_app,
    rate_option,
)
from outbox.cli.output import progress, write_json, write_line, write_table
from outbox.cli.supervisor import Schedule, Watching, run_until_stopped
from outbox.dead_letters import Retrier, RetryCounts, RetrySchedule, Scheduler
from outbox.dead_letters.measure import Measure
from outbox.duration import read_duration
from outbox.errors import ConfigError
from outbox.events import Observer, Observers
from outbox.observability.activity import Activity
from outbox.observability.database_measure import DatabaseMeasure
from outbox.observability.health import Health
from outbox.observability.logging import LogEvents
from outbox.payload_codec import PayloadCodec, load_codec
from outbox.postgres.sql_files import load
from outbox.retry import RetryPolicy
from outbox.url import FileUrl
from relay.activity import RelayCounts
from relay.config import RelayConfig
from relay.dead_letters.retry import publishing_retrier
from relay.events import (
    BrokerDiffers,
    BrokerLost,
    BrokerMatches,
    BrokerRecovered,
    DatabaseLost,
    DatabaseRecovered,
    LanesFree,
    LanesWithheld,
    RelayStarted,
)
from relay.publisher import Publisher
from relay.relay import Relay
from relay.renewed_publisher import RenewedPublisher
from relay.replay import Published, ReplayCriteria, count_published, replay_published

_DEFAULT: Final = RelayConfig()
_PUBLISHED_COLUMNS: Final = ("topic", "messages", "oldest", "newest")

relay_app = new_app()
replay_app = new_app()


def _number(name: str, meaning: str) -> Any:
    return typer.Option(f"--{name}", metavar="N", help=meaning)


@command(
    relay_app,
    epilog="Exit status: 0 stopped and drained; 2 it could not run; 70 the watchdog "
    "ended it.",
)
def relay(
    *,
    broker: Broker = None,
    database: Database = None,
    codec: Codec = None,
    batch_size: Annotated[
        int, _number("batch-size", "Messages in one claim.")
    ] = _DEFAULT.batch_size,
    concurrency: Annotated[
        int, _number("concurrency", "Batches in flight at once.")
    ] = _DEFAULT.concurrency,
    max_batch_bytes: Annotated[
        int, _number("max-batch-bytes", "Bytes in one claim.")
    ] = _DEFAULT.max_batch_bytes,
    max_payload_bytes: Annotated[
        int,
        _number(
            "max-payload-bytes",
            "A message with a larger payload becomes a dead letter without being "
            "loaded.",
        ),
    ] = _DEFAULT.max_payload_bytes,
    lease: Annotated[
        timedelta,
        duration_option("--lease", help="How long a relay that hangs keeps its lanes."),
    ] = Duration.of(_DEFAULT.lease),
    poll_interval: Annotated[
        timedelta,
        duration_option(
            "--poll-interval",
            help="How often to look for messages without being woken.",
        ),
    ] = Duration.of(_DEFAULT.poll_interval),
    broker_check_interval: Annotated[
        timedelta,
        duration_option(
            "--broker-check-interval",
            help="How often an idle relay checks that the broker responds.",
        ),
    ] = Duration.of(_DEFAULT.broker_check_interval),
    publish_timeout: Annotated[
        timedelta,
        duration_option(
            "--publish-timeout",
            help="How long a publish may take before the broker is considered "
            "unavailable.",
        ),
    ] = Duration.of(_DEFAULT.publish_timeout),
    drain: Annotated[
        timedelta,
        duration_option(
            "--drain", help="How long to wait for batches in flight when stopping."
        ),
    ] = Duration.of(_DEFAULT.drain),
    max_attempts: Annotated[
        int,
        _number(
            "max-attempts",
            "Maximum attempts to publish a message before it becomes a dead letter.",
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
    schedule: Schedule,
    watching: Watching,
) -> int:
    """Publish committed messages until SIGTERM; then drain and exit."""
    options = RetryOptions(
        database=database_url(database),
        broker=broker_url(broker),
        codec=codec,
        consumer=None,
        schedule=schedule.read(),
    )
    config = RelayConfig(
        batch_size=batch_size,
        concurrency=concurrency,
        max_batch_bytes=max_batch_bytes,
        max_payload_bytes=max_payload_bytes,
        lease=lease,
        poll_interval=poll_interval,
        broker_check_interval=broker_check_interval,
        publish_timeout=publish_timeout,
        drain=drain,
        strict_order=strict_order,
        retry=RetryPolicy(max_attempts=max_attempts),
        codec=_load_codec(codec),
    )
    return _run(options, config, watching, switch_broker=switch_broker)


def _run(
    options: RetryOptions,
    config: RelayConfig,
    watching: Watching,
    *,
    switch_broker: bool,
) -> int:
    broker = broker_url(options.broker)
    health = Health(
        RelayStarted,
        {
            BrokerLost: BrokerRecovered,
            DatabaseLost: DatabaseRecovered,
            LanesWithheld: LanesFree,
            BrokerDiffers: BrokerMatches,
        },
    )
    counts = RelayCounts()
    metrics = watching.metrics()
    observers: list[Observer] = [LogEvents()]
    if metrics is not None:
        from outbox.observability.prometheus import DatabaseMetrics
        from relay.metrics import RelayMetrics

        observers += [
            metrics,
            RelayMetrics(metrics.registry, metrics.topics, counts),
            DatabaseMetrics(metrics.registry),
        ]
    notify = Observers(observers).notify
    process = Relay(
        database_url(options.database),
        _make_publisher(broker),
        config,
        observers=[*observers, health, counts],
        name=broker.partition(":")[0],
        broker=broker,
        switch_broker=switch_broker,
    )
    background = [Activity(counts, watching.log_interval, notify).run]
    if options.schedule is not None:
        background.append(_scheduler(options, options.schedule, notify).run)
    if metrics is not None:
        measure = Measure(
            partial(_open_retrier, options),
            schema="outbox",
            origin=None,
            seconds=watching.metrics_interval.total_seconds(),
            notify=notify,
        )
        database = DatabaseMeasure(
            database_url(options.database),
            seconds=watching.metrics_interval.total_seconds(),
            notify=notify,
        )
        background += [measure.run, database.run]
    return run_until_stopped(process, background, watching, health, metrics)


def _load_codec(path: str | None) -> PayloadCodec | None:
    return load_codec(path) if path else None


def _make_publisher(broker: str) -> Publisher:
    if isinstance(broker, FileUrl):
        return RenewedPublisher(broker, _make_publisher)
    found = implementation("relay.publishers", broker)
    return cast("Publisher", found.from_url(broker))


def _lacks(options: RetryOptions) -> str | None:
    try:
        broker_url(options.broker)
    except ConfigError as error:
        return f"dead letters of the outbox are published again: {error}"
    return None


def _open_retrier(
    options: RetryOptions, notify: Observer = lambda _: None
) -> AbstractAsyncContextManager[Retrier]:
    broker = broker_url(options.broker)
    return publishing_retrier(
        database_url(options.database),
        # A separate publisher: the relay's may be publishing a message of the same key.
        partial(_make_publisher, broker),
        broker=broker,
        config=RelayConfig(codec=_load_codec(options.codec)),
        schedule=options.schedule,
        notify=notify,
    )


def _scheduler(
    options: RetryOptions, schedule: RetrySchedule, notify: Observer
) -> Scheduler:
    return Scheduler(
        partial(_open_retrier, options, notify),
        schedule,
        schema="outbox",
        origin=None,
        notify=notify,
    )


async def _run_due(options: RetryOptions, notify: Observer) -> RetryCounts | None:
    schedule = options.schedule or RetrySchedule()
    notify = Observers([LogEvents(), notify]).notify
    return await _scheduler(options, schedule, notify).run_due()


SIDE: Final = Side(
    schema="outbox",
    lacks=_lacks,
    open_retrier=_open_retrier,
    run_due=_run_due,
    list_blocked=load("relay", "list_refused"),
    count_blocked=load("relay", "count_refused"),
)


@command(replay_app)
def replay(
    *,
    since: Annotated[
        str,
        typer.Option(
            "--since",
            metavar="MOMENT",
            help="Added then or later: a moment with its time zone, such as "
            "2026-01-31T14:00Z, or how long ago: 90s, 6h, 7d.",
        ),
    ],
    until: Annotated[
        str | None,
        typer.Option(
            "--until", metavar="MOMENT", help="Added before.", show_default="now"
        ),
    ] = None,
    topic: Annotated[
        str | None,
        typer.Option(
            "--topic",
            metavar="TOPIC",
            help="Topic, or prefix followed by a star: 'orders.*'.",
        ),
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", metavar="KEY", help="Key.")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="TENANT", help="Tenant.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", metavar="N", min=1, help="Maximum number, the oldest first."
        ),
    ] = None,
    rate: Annotated[
        float | None, rate_option("Maximum rate: 10/s, 90/m or 500/h.")
    ] = None,
    batch_size: Annotated[
        int,
        typer.Option(
            "--batch-size", metavar="N", min=1, help="Messages in one transaction."
        ),
    ] = 1000,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count them without changing anything.")
    ] = False,
    database: Database = None,
    json: Json = False,
) -> None:
    """Publish messages again, selected by topic, key and time."""
    now = datetime.now(UTC)
    choice = ReplayCriteria(
        since=_moment("--since", since, now),
        until=now if until is None else _moment("--until", until, now),
        topic=topic,
        key=key,
        tenant=tenant,
        max_rows=limit,
    )
    with administration(
        database_url(database),
        application_name="pillarbox replay",
        rights="GRANT pillarbox_relay TO its role",
    ) as connection:
        found = count_published(connection, choice)
        if dry_run:
            _write(found, as_json=json)
            return
        total = sum(topic.messages for topic in found)
        total = min(total, choice.max_rows or total)
        done = 0
        with progress(total) as bar:

            def show(count: int) -> None:
                nonlocal done
                done = count
                bar(min(count, total), {})

            try:
                replayed = replay_published(
                    connection,
                    choice,
                    # Don't exceed the rate within a second, either.
                    batch_size=min(batch_size, max(1, int(rate or batch_size))),
                    max_per_second=rate,
                    on_batch=show,
                )
            finally:
                if done < total:
                    sys.stderr.write(f"{total - done} of {total} were not replayed\n")
    if json:
        write_json({"replayed": replayed})
    else:
        write_line(f"{replayed} replayed: ready to be published again")


def _moment(option: str, text: str, now: datetime) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        try:
            return now - read_duration(option, text)
        except (ConfigError, OverflowError):
            moment = None
    if moment is None or moment.tzinfo is None:
        raise ConfigError(
            f"{option} {text!r}: write a moment with its time zone such as "
            "2026-01-31T14:00Z, or how long ago: 90s, 15m, 6h, 7d, 2w or 1h30m"
        )
    return moment


def _write(found: Sequence[Published], *, as_json: bool) -> None:
    if as_json:
        write_json([asdict(topic) for topic in found])
        return
    if not found:
        write_line("no published message matches")
        return
    write_table(
        _PUBLISHED_COLUMNS,
        [
            (
                t.topic,
                t.messages,
                *(f"{m:%Y-%m-%d %H:%M:%S%z}" for m in (t.oldest, t.newest)),
            )
            for t in found
        ],
    )
