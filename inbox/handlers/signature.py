"""Check a handler's signature when it is registered."""

import asyncio
import collections.abc
import functools
import inspect
import typing
from collections.abc import Callable
from enum import Enum
from typing import Any, Final

from sqlalchemy.orm import Session

from inbox.handlers.routes import name_of
from inbox.jobs.job import AsyncJob, Job
from outbox.errors import ConfigError
from outbox.message import Message
from outbox.writer import ADDED

_MANY: Final = (collections.abc.Sequence, collections.abc.Iterable, list, tuple)


class Takes(Enum):
    """The arguments of each kind of handler."""

    ONE = "(session, message)"
    MANY = "(session, messages)"
    JOB = "(job, message)"


def check_signature(handler: Callable[..., Any], takes: Takes) -> None:
    """Refuse a handler that can't be called this way, or whose call would do nothing.

    Raises:
        ConfigError: it isn't a function, has other arguments, yields, or its
            annotations are those of another kind of handler.
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
    called = _function_of(handler)
    if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        raise ConfigError(
            f"handler {name_of(handler)}: is a generator, so calling it runs nothing; "
            "remove yield"
        )
    _check_arguments(handler, takes)
    _check_annotations(handler, takes)


def refuse_unrun(handler: Callable[..., Any], result: object) -> None:
    """Refuse work that a handler returned instead of doing it: nobody would run it.

    Raises:
        ConfigError: it is an awaitable, a generator or an async generator.
    """
    if inspect.isgenerator(result):
        result.close()
        problem = "returned a generator, which was never run; iterate over it inside"
    elif inspect.isasyncgen(result):
        problem = (
            "returned an async generator, which was never run; iterate over it inside, "
            "with async for"
        )
    elif inspect.isawaitable(result) and result is not ADDED:
        _discard(result)
        problem = (
            "returned an awaitable, which was never awaited; write return await …"
            if is_async(handler)
            else "is a plain function and returned an awaitable, which was never "
            "awaited; write async def, with an async_sessionmaker"
        )
    else:
        return
    raise ConfigError(f"handler {name_of(handler)}: {problem}")


def _discard(work: object) -> None:
    if inspect.iscoroutine(work):
        work.close()
    elif isinstance(work, asyncio.Future):
        # It would go on in a session that is closed. A plain function runs in a thread.
        work.get_loop().call_soon_threadsafe(work.cancel)


def is_async(handler: Callable[..., Any]) -> bool:
    """Return whether calling the handler returns a coroutine."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
        _function_of(handler)
    )


def _function_of(handler: Any) -> Any:
    while isinstance(handler, functools.partial):
        handler = handler.func
    if inspect.isroutine(handler):
        return handler
    return getattr(handler, "__call__", handler)  # noqa: B004 (asks what it calls)


def _check_arguments(handler: Callable[..., Any], takes: Takes) -> None:
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):
        return  # a builtin without a signature
    try:
        signature.bind(object(), object())
    except TypeError as error:
        names = list(signature.parameters)
        remedy = (
            "pass the method of an object"
            if names[:1] == ["self"]
            else f"let it take {takes.value}"
        )
        raise ConfigError(
            f"handler {name_of(handler)}({', '.join(names)}): is called with "
            f"{takes.value}, and {error}; {remedy}"
        ) from None


def _check_annotations(handler: Callable[..., Any], takes: Takes) -> None:
    first, second = _annotations(handler)
    problem = None
    if _is(first, Message) and (_is_session(second) or _is(second, Job, AsyncJob)):
        problem = f"takes its arguments in another order than {takes.value}; swap them"
    elif takes is Takes.JOB and _is_session(first):
        problem = (
            "takes a session, and with lease= a handler takes (job, message); use "
            "job.transaction() inside, or leave lease out"
        )
    elif takes is not Takes.JOB and _is(first, Job, AsyncJob):
        problem = "takes a job; register it with lease=…, or let it take a session"
    elif takes is Takes.MANY and _is(second, Message):
        problem = (
            "takes one message, and with batch= a handler takes (session, messages); "
            "write Sequence[Message], or leave batch out"
        )
    elif takes is Takes.ONE and _is_many(second):
        problem = "takes many messages; register it with batch=…, or let it take one"
    elif is_async(handler) and (_is(first, Session) or _is(first, Job)):
        problem = (
            "is async and takes what is for plain functions; annotate it with "
            + ("AsyncJob" if _is(first, Job) else "AsyncSession")
        )
    elif not is_async(handler) and (_is_async_session(first) or _is(first, AsyncJob)):
        problem = (
            "is a plain function and takes what is for async ones; write async def"
        )
    if problem is not None:
        raise ConfigError(f"handler {name_of(handler)}: {problem}")


def _annotations(handler: Callable[..., Any]) -> tuple[Any, Any]:
    """Return the annotations of the two arguments; None for any that can't be read."""
    try:
        names = [
            parameter.name
            for parameter in inspect.signature(handler).parameters.values()
            if parameter.kind
            in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        hints = typing.get_type_hints(inspect.unwrap(_function_of(handler)))
    except Exception:  # noqa: BLE001 (names of type checkers alone, builtins, mocks)
        return None, None
    first, second, *_ = *names, "", ""
    return hints.get(first), hints.get(second)


def _is_many(annotation: object) -> bool:
    # The message of an @idempotent handler can be a list.
    return typing.get_origin(annotation) in _MANY and any(
        _is(one, Message) for one in typing.get_args(annotation)
    )


def _is(annotation: object, *kinds: type) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, kinds)


def _is_session(annotation: object) -> bool:
    return _is(annotation, Session) or _is_async_session(annotation)


def _is_async_session(annotation: object) -> bool:
    # Compare names, because AsyncSession can't be imported without greenlet.
    return isinstance(annotation, type) and any(
        kind.__name__ == "AsyncSession" and kind.__module__.startswith("sqlalchemy.")
        for kind in annotation.__mro__
    )
