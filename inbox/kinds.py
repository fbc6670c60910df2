"""The kinds of handlers: ordinary ones, long ones, and those of many messages."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias

from inbox.batch import Batching
from inbox.idempotent import on_duplicate_of
from inbox.leased import LongHandler
from inbox.prepare import Terms, prepare
from inbox.routes import Handler, name_of
from outbox.errors import ConfigError

AnyHandler: TypeAlias = Handler | Batching | LongHandler


def make_handler(
    handler: Callable[..., Any],
    terms: Terms,
    *,
    lease: timedelta | None,
    batch: int | None,
) -> AnyHandler:
    """Choose the kind of a handler by what it was registered with.

    Raises:
        ConfigError: it can't be of two kinds, a number can't be used, or what it
            does with duplicates isn't for a consumer.
    """
    on_duplicate = on_duplicate_of(handler)
    if on_duplicate is not None and (lease is not None or batch is not None):
        raise ConfigError(
            f"handler {name_of(handler)}: is @idempotent, and lease and batch record "
            "the receipts of their handlers; leave @idempotent out"
        )
    if on_duplicate == "raise":
        raise ConfigError(
            f'handler {name_of(handler)}: on_duplicate="raise": a consumer would take '
            "a duplicate for a failure, try it again and give it up; say "
            '"skip" or "replay"'
        )
    if lease is not None and batch is not None:
        raise ConfigError(
            f"handler {name_of(handler)}: lease and batch: a long handler takes one "
            "message at a time; leave one of them out"
        )
    if lease is not None:
        return LongHandler(handler, terms, lease)
    if batch is not None:
        return Batching(handler, terms, batch)
    return prepare(handler, terms)
