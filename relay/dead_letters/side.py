"""The relay's part of repair: retries by its publisher."""

from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Final

from pillarbox.outbox.administration.sides import RetryOptions, Side
from pillarbox.outbox.dead_letters.retry import Retrier
from pillarbox.outbox.events import Observer
from pillarbox.outbox.payload.payload_codec import load_codec
from pillarbox.relay.config import RelayConfig
from pillarbox.relay.dead_letters.retry import PublishingRetrier
from pillarbox.relay.renewed_publisher import publisher_of


def _lacks(options: RetryOptions) -> str | None:
    if options.broker is not None:
        return None
    return (
        "outbox dead letters: no broker given: use --broker URL, set"
        " PILLARBOX_BROKER_URL, or let PILLARBOX_BROKER_URL_FILE name a file that"
        " holds the URL"
    )


def _open_retrier(
    options: RetryOptions, notify: Observer
) -> AbstractAsyncContextManager[Retrier]:
    assert options.broker is not None
    return PublishingRetrier(
        options.database,
        # A separate publisher: the relay's may be publishing a message of the same key.
        partial(publisher_of, options.broker),
        broker=options.broker,
        config=RelayConfig(codec=load_codec(options.codec) if options.codec else None),
        schedule=options.schedule,
        notify=notify,
    )


SIDE: Final = Side(schema="outbox", lacks=_lacks, open_retrier=_open_retrier)
