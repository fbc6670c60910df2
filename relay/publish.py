"""Publish: hand a claimed batch to the broker and learn which messages it accepted."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeAlias

from pillarbox.outbox import tracing
from pillarbox.outbox.errors import BrokerTimeoutError, BrokerUnavailableError, one_line
from pillarbox.outbox.events import Event
from pillarbox.outbox.log.lanes.batch import ClaimedMessage
from pillarbox.outbox.log.lanes.keys import BatchKeys
from pillarbox.outbox.logs.printable import count
from pillarbox.outbox.message import Message
from pillarbox.relay.adaptive_batch import BatchLimit
from pillarbox.relay.config import RelayConfig
from pillarbox.relay.events import BatchPublished
from pillarbox.relay.publisher import Acked, Confirmation, Nacked, Publisher

Answer: TypeAlias = Confirmation | None
"""None: the message wasn't sent, or its outcome is unknown; nothing is recorded."""

MAX_REASON: Final = 2000


async def publish_batch(
    rows: Sequence[ClaimedMessage],
    publisher: Publisher,
    config: RelayConfig,
    *,
    batch_limit: BatchLimit,
    leased: Callable[[], bool],
    notify: Callable[[Event], None],
) -> tuple[list[Answer], BrokerUnavailableError | None]:
    """Publish the rows in order; return one answer for each.

    A row that can't be read is nacked as permanent and never sent. The lease is checked
    before each call of the publisher; if it is lost, the rest stays untouched. If the
    broker turns out to be unavailable, the error is returned along with the answers so
    far. No call carries more messages than `batch_limit` allows; it adapts to how long
    calls take.
    """
    answers: list[Answer] = [
        Nacked(row.problem, permanent=True) if row.problem is not None else None
        for row in rows
    ]
    waves = deque(_waves(rows, strict=config.strict_order))
    keys = BatchKeys()
    while waves:
        # A message that was just refused holds back later ones of its key.
        wave = [i for i in waves.popleft() if rows[i].key not in keys.closed]
        if len(wave) > batch_limit.max_messages:
            waves.appendleft(wave[batch_limit.max_messages :])
            wave = wave[: batch_limit.max_messages]
        messages = [message for i in wave if (message := rows[i].message)]
        if not messages:
            continue
        if not leased():
            return answers, None
        started = time.monotonic()
        try:
            confirmations: Sequence[Answer]
            confirmations = await publish_messages(messages, publisher, config)
        except BrokerUnavailableError as error:
            if isinstance(error, BrokerTimeoutError):
                batch_limit.record_timeout(len(messages))
            return answers, error
        except Exception as error:  # noqa: BLE001 - no publisher may stop the relay
            if len(wave) > 1:
                # Publish one by one to find the message that made the publisher raise.
                waves.extendleft([i] for i in reversed(wave))
                continue
            confirmations = [Nacked(one_line(error)[:MAX_REASON])]
        seconds = time.monotonic() - started
        batch_limit.record_success(seconds)
        for i, confirmation in zip(wave, confirmations, strict=True):
            answers[i] = confirmation
            if isinstance(confirmation, Nacked) and not confirmation.permanent:
                keys.close(rows[i].key)
        acked = [rows[i] for i in wave if isinstance(answers[i], Acked)]
        notify(
            BatchPublished(
                messages=len(messages),
                acked=len(acked),
                seconds=seconds,
                topics=[row.topic for row in acked],
                due_at=[row.due_at or row.created_at for row in acked],
            )
        )
    return answers, None


def _waves(rows: Sequence[ClaimedMessage], *, strict: bool) -> Iterator[Sequence[int]]:
    """Split a batch so that messages likely to be nacked go before those behind them.

    In strict mode, no call contains two messages of a key. Otherwise, only a message
    that was nacked before goes ahead of the rest of its key.
    """
    pending: Iterable[int] = [i for i, row in enumerate(rows) if row.problem is None]
    if not strict and not any(row.attempts for row in rows):
        yield list(pending)
        return
    while pending:
        wave, later = [], []
        closed: set[str] = set()
        for i in pending:
            row = rows[i]
            if row.key is not None and row.key in closed:
                later.append(i)
                continue
            wave.append(i)
            if row.key is not None and (strict or row.attempts):
                closed.add(row.key)
        yield wave
        pending = later


async def publish_messages(
    messages: Sequence[Message], publisher: Publisher, config: RelayConfig
) -> Sequence[Confirmation]:
    """Publish messages in one call, within the publish timeout and a span.

    Raises:
        BrokerUnavailableError: the broker is unavailable, or gave no answer.
    """
    if tracing.tracer is None:
        return await _confirmed(messages, publisher, config)
    with tracing.tracer.send(messages, tracing.system_of(publisher)) as sending:
        answers = await _confirmed(messages, publisher, config)
        if refusals := [a.reason for a in answers if isinstance(a, Nacked)]:
            sending.refused(refusals)
        return answers


async def _confirmed(
    messages: Sequence[Message], publisher: Publisher, config: RelayConfig
) -> Sequence[Confirmation]:
    try:
        async with asyncio.timeout(config.publish_timeout.total_seconds()):
            confirmations = await publisher.publish(messages)
    except TimeoutError:
        size = sum(len(message.payload) for message in messages)
        raise BrokerTimeoutError(
            f"no answer within {config.publish_timeout.total_seconds():g} s for "
            f"{count(len(messages), 'message')} of {size} bytes in total"
        ) from None
    except OSError as error:
        raise BrokerUnavailableError(str(error)) from error
    if len(confirmations) != len(messages):
        raise ValueError(
            f"the publisher returned {count(len(confirmations), 'answer')} for"
            f" {count(len(messages), 'message')}"
        )
    return confirmations
