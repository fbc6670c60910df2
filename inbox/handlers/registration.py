"""The kinds of handlers: ordinary ones, long ones, and those of many messages."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, TypeAlias, cast

from inbox.handlers.batch import Batching
from inbox.handlers.executor import Terms, prepare
from inbox.handlers.routes import Handler, Routes, name_of
from inbox.idempotent import on_duplicate_of
from inbox.jobs.runner import LongHandler
from outbox.errors import ConfigError
from outbox.retry import RetryPolicy

AnyHandler: TypeAlias = Handler | Batching | LongHandler

_RETRY: Final = "__retry_policy__"


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
    made = prepare(handler, terms)
    setattr(made, _RETRY, terms.retry)
    return made


def retry_of(handler: AnyHandler) -> RetryPolicy | None:
    """Give the policy that a handler was registered with, if it has one of its own."""
    if isinstance(handler, Batching | LongHandler):
        return handler.terms.retry
    return cast("RetryPolicy | None", getattr(handler, _RETRY, None))


def longest_retry(usual: RetryPolicy, routes: Routes[AnyHandler]) -> RetryPolicy:
    """Give the policy that lets a message wait longest, of all handlers."""
    own = (retry_of(handler) for handler in routes.handlers)
    return max((usual, *filter(None, own)), key=lambda retry: retry.longest)


def most_connections(max_in_flight: int, routes: Routes[AnyHandler]) -> int:
    """Tell how many connections so many messages at work take at once.

    A batch handler has one batch at work at a time. Long handlers need one besides,
    for their heartbeats.
    """
    batches = sum(isinstance(handler, Batching) for handler in routes.handlers)
    is_long = has_long_handlers(routes)
    if batches == len(routes.handlers):
        return min(max_in_flight, batches)
    return max_in_flight + is_long


def has_long_handlers(routes: Routes[AnyHandler]) -> bool:
    """Tell whether there are any, which need the table of jobs."""
    return any(isinstance(handler, LongHandler) for handler in routes.handlers)
