"""Register handlers: ordinary ones, long ones, and batch handlers."""

from collections.abc import Callable
from typing import Any, Final, TypeAlias, cast

from inbox.handlers.batch import Batching
from inbox.handlers.routes import Handler, Routes
from inbox.handlers.terms import Terms, prepare
from inbox.jobs.runner import LongHandler

AnyHandler: TypeAlias = Handler | Batching | LongHandler

_TERMS: Final = "__terms__"


def make_handler(handler: Callable[..., Any], terms: Terms) -> Handler:
    """Create the handler of single messages."""
    made = prepare(handler, terms)
    setattr(made, _TERMS, terms)
    return made


def terms_of(handler: AnyHandler) -> Terms:
    """Return the terms that a handler was registered with."""
    if isinstance(handler, Batching | LongHandler):
        return handler.terms
    return cast("Terms", getattr(handler, _TERMS))


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
