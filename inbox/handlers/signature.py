"""The form of a handler: a function, plain or async, and what it returns."""

import asyncio
import functools
import inspect
from collections.abc import Callable
from enum import Enum
from typing import Any, Final

from pillarbox.inbox.handlers.routes import name_of
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.writer import NOTHING_TO_AWAIT

IDEMPOTENT: Final = "__idempotent__"
"""The attribute of functions that record a receipt themselves."""


class Takes(Enum):
    """The arguments of each kind of handler."""

    ONE = "(session, message)"
    MANY = "(session, messages)"
    JOB = "(job, message)"


def check_callable(handler: Callable[..., Any], takes: Takes) -> None:
    """Refuse a handler that can't be called, or whose call would do nothing.

    Raises:
        ConfigError: it isn't a function, or yields.
    """
    if not callable(handler):
        raise ConfigError(
            f"handler {name_of(handler)}: can't be called; pass a function of "
            f"{takes.value}"
        )
    if inspect.isclass(handler):
        raise ConfigError(
            f"handler {name_of(handler)}: is a class; pass a function of "
            f"{takes.value}, or a callable object that takes them"
        )
    called = function_of(handler)
    if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        raise ConfigError(
            f"handler {name_of(handler)}: is a generator, so calling it runs nothing; "
            "remove yield"
        )


def refuse_unrun(handler: Callable[..., Any], result: Any) -> None:
    """Refuse work that a handler returned instead of doing it: nobody would run it.

    Raises:
        ConfigError: it is an awaitable, a generator or an async generator.
    """
    if result is None or result is NOTHING_TO_AWAIT:  # what add returns
        return
    is_closed = inspect.isgenerator(result) or inspect.iscoroutine(result)
    if not (is_closed or inspect.isasyncgen(result) or inspect.isawaitable(result)):
        return
    if is_closed:
        result.close()
    elif isinstance(result, asyncio.Future):
        # It would run with a closed session. A plain function runs in a thread.
        result.get_loop().call_soon_threadsafe(result.cancel)
    raise ConfigError(
        f"handler {name_of(handler)}: returned a {type(result).__name__} that nobody"
        " would run; await it in an async def, or iterate over it in the handler"
    )


def is_async(handler: Callable[..., Any]) -> bool:
    """Return whether calling the handler returns a coroutine."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
        function_of(handler)
    )


def function_of(handler: Any) -> Any:
    """Return the function that a call of the handler runs."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if inspect.isroutine(handler):
        return handler
    return getattr(handler, "__call__", handler)  # noqa: B004 (asks what it calls)
