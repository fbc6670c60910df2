"""Register handlers: ordinary ones, long ones, and batch handlers."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, TypeAlias, cast

from inbox.handlers.batch import Batching
from inbox.handlers.executor import Terms, prepare
from inbox.handlers.routes import Handler, Routes, name_of
from inbox.idempotent import note_lift, on_duplicate_of
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
    """Create a handler of the kind that it was registered as.

    Raises:
        ConfigError: it is of two kinds, a number is invalid, or a consumer doesn't
            support its `on_duplicate` policy.
    """
    on_duplicate = on_duplicate_of(handler)
    if on_duplicate is not None and (lease is not None or batch is not None):
        raise ConfigError(
            f"handler {name_of(handler)}: is @idempotent, and lease and batch record "
            "the receipts of their handlers; leave @idempotent out"
        )
    if on_duplicate == "raise":
        raise ConfigError(
            f'handler {name_of(handler)}: on_duplicate="raise": a consumer would '
            "treat a duplicate as a failure, and retry and dead-letter it; use "
            '"skip"'
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
    note_lift(made, terms.lift)
    setattr(made, _RETRY, terms.retry)
    return made


def retry_of(handler: AnyHandler) -> RetryPolicy | None:
    """Return the retry policy that a handler was registered with, if any."""
    if isinstance(handler, Batching | LongHandler):
        return handler.terms.retry
    return cast("RetryPolicy | None", getattr(handler, _RETRY, None))


def longest_retry(usual: RetryPolicy, routes: Routes[AnyHandler]) -> RetryPolicy:
    """Return the retry policy of any handler under which a message waits longest."""
    own = (retry_of(handler) for handler in routes.handlers)
    return max((usual, *filter(None, own)), key=lambda retry: retry.longest)


def most_connections(max_in_flight: int, routes: Routes[AnyHandler]) -> int:
    """Return how many connections `max_in_flight` handlers use at most.

    A batch handler handles one batch at a time. Long handlers need one more connection,
    for their heartbeats.
    """
    batches = sum(isinstance(handler, Batching) for handler in routes.handlers)
    is_long = has_long_handlers(routes)
    if batches == len(routes.handlers):
        return min(max_in_flight, batches)
    return max_in_flight + is_long


def has_long_handlers(routes: Routes[AnyHandler]) -> bool:
    """Return whether there are long handlers, which need `inbox.job`."""
    return any(isinstance(handler, LongHandler) for handler in routes.handlers)
