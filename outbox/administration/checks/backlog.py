"""Messages that wait: too long, or with nothing that handles them."""

from collections.abc import Iterator
from datetime import UTC, timedelta
from typing import Final

from pillarbox.outbox.administration.check import (
    Finding,
    Severity,
    error,
    hint,
    warning,
)
from pillarbox.outbox.administration.pauses import Pause
from pillarbox.outbox.administration.readers import consumer_of
from pillarbox.outbox.administration.size import write_size
from pillarbox.outbox.duration import write_duration
from pillarbox.outbox.logs.printable import count, for_shell
from pillarbox.outbox.observability.measures.consumers import ConsumerStatus
from pillarbox.outbox.observability.overview import Overview
from pillarbox.outbox.postgres.advisory_lock import MAIN

_WAITING: Final = timedelta(minutes=1)
_LATE: Final = timedelta(minutes=15)


def check_backlog(overview: Overview) -> Iterator[Finding]:
    """Find messages that have waited for too long, and processes that are missing."""
    yield from _check_outbox(overview)
    for pause in overview.pauses:
        yield _about_pause(pause, overview)
    for consumer in overview.consumers:
        waited = None if consumer.lag is None else consumer.lag.waited
        if waited is None or waited < _WAITING:
            continue
        oldest = f"its lag is {write_duration(waited)}"
        if consumer.replicas == 0:
            if (held := consumer.held) is not None:
                oldest += (
                    f"; it keeps {count(held.days, 'day')} from being dropped, since"
                    f" {held.since.astimezone(UTC):%F}, {write_size(held.bytes)}"
                )
            yield warning(
                f"the consumer {consumer.name} is not running, and {oldest}",
                "pillarbox consume MODULE:NAME  # start it; or, if it is no longer"
                f" needed, pillarbox readers drop {for_shell(consumer.name)}",
            )
        elif (lag := _unpaused(consumer, overview)) and lag > _LATE:
            yield warning(
                f"the consumer {consumer.name} is late: its lag is"
                f" {write_duration(lag)}",
                "look for a slow handler in its log, or start another replica",
            )


def _unpaused(consumer: ConsumerStatus, overview: Overview) -> timedelta | None:
    """Return the lag of a consumer, of its largest topics if others are paused."""
    if consumer.lag is None:
        return None
    if not (pauses := overview.pauses_of(consumer.name)):
        return consumer.lag.waited
    return max(
        (
            it.waited
            for it in consumer.lag.topics
            if it.waited and not any(pause.has(it.name or "") for pause in pauses)
        ),
        default=None,
    )


def _about_pause(pause: Pause, overview: Overview) -> Finding:
    age = write_duration(overview.at - pause.paused_at)
    text = f"{pause.what} is paused by {pause.paused_by} for {age}: {pause.reason}"
    known = sorted({consumer_of(it.name) for it in overview.consumers})
    if known and pause.consumer is not None and pause.consumer not in known:
        return warning(
            f"{text}; no consumer of this name runs with this database, reads its"
            f" outbox or has just handled messages; these do: {', '.join(known)}",
            pause.remedy,
        )
    lags = [
        it.lag.waited
        for it in overview.consumers
        if it.lag and it.lag.waited and pause in overview.pauses_of(it.name)
    ]
    waited = max(lags, default=timedelta())
    kept = [it.retention for it in overview.tables if it.table == "outbox.message"]
    if any(waited > it / 2 for it in kept):
        text += (
            f"; its oldest message has waited for {write_duration(waited)}, more than "
            "half its retention: its partition will be held"
        )
        return warning(text, pause.remedy)
    return hint(text, pause.remedy)


def _relay_of(reader: str, overview: Overview) -> str:
    """Return the command that starts a relay of a reader."""
    processes = overview.processes
    broker = None if processes is None else processes.readers.get(reader)
    if broker is None or "#" in broker:  # only a hash of its path is recorded
        broker = "URL"
    words = ["pillarbox", "relay", "--broker", broker]
    if reader != MAIN:
        words += ["--reader", reader]
    return " ".join(map(for_shell, words))


def _check_outbox(overview: Overview) -> Iterator[Finding]:
    processes = overview.processes
    unserved = () if processes is None else processes.unserved
    # Where consumers read, one that no relay has ever run may not be needed.
    is_needed = not any(it.is_reader for it in overview.consumers) or (
        processes is not None and processes.broker is not None
    )
    for reader in unserved:
        if reader != MAIN or not is_needed:
            yield warning(
                f"no relay of reader {reader} is running",
                f"{_relay_of(reader, overview)}  # start it; or, if it is no longer"
                f" needed, pillarbox readers drop {for_shell(reader)}",
            )
    is_relayed = MAIN not in unserved or not is_needed
    waited = None if overview.outbox is None else overview.outbox.waited
    if waited is None or waited < _WAITING:
        if not is_relayed:
            yield hint(
                "no relay is running, so new messages won't be published",
                f"{_relay_of(MAIN, overview)}  # unless it publishes nothing",
            )
        return
    retention = [it.retention for it in overview.tables if it.table == "outbox.message"]
    is_held = any(waited > it / 2 for it in retention)
    is_late = waited > _LATE
    oldest = f"the oldest due message has been waiting for {write_duration(waited)}"
    if is_held:
        oldest += ", more than half of its retention: its partition will be kept"
    if not is_relayed:
        yield error(
            f"no relay is running, and {oldest}",
            f"{_relay_of(MAIN, overview)}  # start it",
        )
    elif (
        processes is not None
        and MAIN in processes.readers
        and processes.free
        and not overview.is_standby
    ):
        yield Finding(
            Severity.ERROR if is_late else Severity.WARNING,
            f"no relay holds {len(processes.free)} of {processes.lanes} lanes, and"
            f" {oldest}",
            "pillarbox doctor  # names the sessions that block these lanes",
        )
    elif is_late:
        yield Finding(
            # Without a view of the processes, nobody can say that they are at work.
            Severity.ERROR if is_held or processes is None else Severity.WARNING,
            oldest,
            "look in the relays' logs for a slow broker or database, or start another"
            " relay",
        )
