"""The arguments of a handler, read from its annotations when it is registered.

    Session, AsyncSession     the session of its transaction
    psycopg's Connection,     the connection of its transaction, if the consumer has
    AsyncConnection           a pool
    Job, AsyncJob             the job of a long handler
    Message                   the message
    bytes                     its payload as it is
    a Pydantic model, a       its payload as an instance, validated
    dataclass, msgspec.Struct,
    attrs class, TypedDict,
    dict or list

They can have any order, and there can be a message beside a payload. A batch handler
takes a sequence of messages or payloads. What has no annotation is the session or job
first, then the message.
"""

import collections.abc
import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, Final, TypeAlias

import psycopg
from sqlalchemy.orm import Session
from typing_extensions import is_typeddict

from pillarbox.inbox.errors import DeadLetter
from pillarbox.inbox.handlers.routes import name_of
from pillarbox.inbox.handlers.signature import (
    IDEMPOTENT,
    Takes,
    check_callable,
    function_of,
    is_async,
)
from pillarbox.inbox.jobs.job import AsyncJob, Job
from pillarbox.outbox.errors import CodecError, ConfigError, shorten
from pillarbox.outbox.message import Message
from pillarbox.outbox.payload import json_codec as codec
from pillarbox.outbox.payload.schema_registry import (
    PayloadError,
    Validator,
    validator_of,
)

_MANY: Final = (collections.abc.Sequence, collections.abc.Iterable, list)
_OPEN: Final = (Any, object)
_UNIONS: Final = (typing.Union, types.UnionType)
_MODEL: Final = ("__pydantic_validator__", "__struct_fields__", "__attrs_attrs__")
_BY_NAME: Final = {
    **{one.__name__: one for one in (Session, Message, Job, AsyncJob)},
    "AsyncSession": Any,  # can't be imported without greenlet
}


class Role(Enum):
    """An argument that needs no decoding."""

    SESSION = "session"
    JOB = "job"
    MESSAGE = "message"
    PAYLOAD = "payload"


Argument: TypeAlias = Role | Validator


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a handler, in its order.

    Attributes:
        takes: which kind of handler it is.
        takes_session: whether its annotations ask for a session of SQLAlchemy.
        takes_psycopg: whether they ask for a connection of psycopg.
        model: the class of the payload, or of each one in a batch; None if the
            annotations name none.
    """

    inner: tuple[Argument, ...]
    takes: Takes = Takes.ONE
    takes_session: bool = False
    takes_psycopg: bool = False
    model: type | None = None

    @property
    def payload(self) -> Validator | None:
        """The decoder of the payload, if there is one."""
        decoders = (one for one in self.inner if not isinstance(one, Role))
        return next(decoders, None)

    def of(self, first: Any, message: Any) -> tuple[Any, ...]:
        """Return what the handler is called with.

        Args:
            first: the session or job.
            message: the message, or those of a batch. Anything else, which an
                `@idempotent` handler can get from another library, is passed on.

        Raises:
            DeadLetter: a payload doesn't match its annotation.
        """
        return tuple(
            first
            if argument is Role.SESSION or argument is Role.JOB
            else message
            if argument is Role.MESSAGE
            else self._payload(argument, message)
            for argument in self.inner
        )

    def _payload(self, argument: Argument, message: Any) -> Any:
        if self.takes is Takes.MANY:
            return [_payload(argument, one) for one in message]
        return _payload(argument, message) if isinstance(message, Message) else message


AS_THEY_ARE: Final = Arguments((Role.SESSION, Role.MESSAGE))


def _payload(argument: Argument, message: Message) -> Any:
    if isinstance(argument, Role):
        return message.payload
    if not codec.is_json(message.content_type):
        raise DeadLetter(
            f"content type {shorten(message.content_type)} isn't JSON, but the"
            " handler takes a decoded payload"
        )
    try:
        return argument.load(message.payload)
    except PayloadError as error:
        raise DeadLetter(f"the payload doesn't fit the handler: {error}") from None


class _Plain:
    """Decodes a payload to a dict or list, without a library."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def json_schema(self) -> Mapping[str, Any]:
        return {"type": "object" if self._kind is dict else "array"}

    def load(self, payload: bytes) -> Any:
        try:
            value = codec.decode(payload)
        except CodecError as error:
            raise PayloadError(error.problem) from None
        if not isinstance(value, self._kind):
            raise PayloadError(f"it isn't a {self._kind.__name__}")
        return value

    check = load


def arguments_of(
    handler: Callable[..., Any], takes: Takes, *, is_lenient: bool = False
) -> Arguments:
    """Return the arguments of a handler.

    Args:
        is_lenient: whether any other annotation is that of the message, because another
            library may call the handler, with messages of its own.

    Raises:
        ConfigError: it isn't a function, yields, can't be called with them, has another
            annotation, takes what another kind of handler takes, or is `@idempotent`.
    """
    check_callable(handler, takes)
    if not is_lenient and hasattr(handler, IDEMPOTENT):
        raise ConfigError(
            f"handler {name_of(handler)}: remove @idempotent: the consumer records"
            " the receipts of its handlers"
        )
    parameters = _parameters(handler)
    if parameters is None:
        _bind(handler, takes, 2)
        return replace(AS_THEY_ARE, takes=takes)
    found: dict[str, Argument] = {}
    annotations = {one.name: _annotation(handler, one) for one in parameters}
    for parameter in parameters:
        annotation = annotations[parameter.name]
        if annotation in _OPEN:
            continue
        argument = _argument(handler, annotation, takes)
        if argument is not None:
            found[parameter.name] = argument
        elif parameter.default is parameter.empty and not is_lenient:
            raise ConfigError(
                f"handler {name_of(handler)}: argument {parameter.name!r} has the"
                f" unsupported annotation {shorten(annotation)}; use the session or"
                " job, Message, bytes, or a type for decoded JSON: a Pydantic model,"
                " a dataclass, a msgspec.Struct, an attrs class, a TypedDict, dict or"
                " list"
            )
    first = Role.JOB if takes is Takes.JOB else Role.SESSION
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.name not in found:
            is_first = first not in _roles(found.values())
            found[parameter.name] = first if is_first else Role.MESSAGE
    inner = tuple(found[one.name] for one in parameters if one.name in found)
    _check(handler, takes, inner)
    return Arguments(
        inner,
        takes,
        takes_session=any(map(_is_session, annotations.values())),
        takes_psycopg=any(map(_is_connection, annotations.values())),
        model=next(
            (it for it in (_model(one, takes) for one in annotations.values()) if it),
            None,
        ),
    )


def reader_of(function: Callable[..., Any]) -> Callable[[Message], Any]:
    """Return what reads the only argument of a function from a message.

    Raises:
        ConfigError: its annotation isn't `Message`, and can't be decoded from JSON.
    """
    first = next(iter(_parameters(function) or ()), None)
    annotation = Any if first is None else _annotation(function, first)
    argument = _argument(function, annotation, Takes.ONE)
    if argument is None or argument in (Role.SESSION, Role.JOB):
        raise ConfigError(
            f"{name_of(function)}: can't take {shorten(annotation)}; let it take the"
            " message or its payload"
        )
    return partial(_read, argument)


def _read(argument: Argument, message: Message) -> Any:
    return message if argument is Role.MESSAGE else _payload(argument, message)


def _parameters(handler: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Return the positional parameters; None if they can't be known."""
    try:
        parameters = inspect.signature(handler).parameters.values()
    except (TypeError, ValueError):
        return None  # a builtin without a signature
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return None
    kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    return [one for one in parameters if one.kind in kinds]


def _annotation(handler: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """Return what a parameter is annotated with; Any if it isn't."""
    if parameter.annotation is parameter.empty:
        return Any
    # Alone, because another annotation may be for type checkers.
    alone = types.SimpleNamespace(
        __annotations__={parameter.name: parameter.annotation}
    )
    function = inspect.unwrap(function_of(handler))
    names = {**_BY_NAME, **getattr(function, "__globals__", {})}
    try:
        return typing.get_type_hints(alone, names, include_extras=True)[parameter.name]
    except Exception as error:
        name = str(parameter.annotation).rpartition(".")[2]
        if name in _BY_NAME:
            return _BY_NAME[name]
        raise ConfigError(
            f"handler {name_of(handler)}: can't resolve the annotation"
            f" {parameter.annotation!r} of argument {parameter.name!r} ({error});"
            " define or import it at run time, not only under TYPE_CHECKING"
        ) from error


def _argument(
    handler: Callable[..., Any], annotation: Any, takes: Takes
) -> Argument | None:
    """Return what an annotation stands for; None if for nothing."""
    for_async = _for_async(annotation)
    has_other_color = for_async is not None and for_async != is_async(handler)
    if has_other_color or _is_misplaced(annotation, takes):
        first = "Job" if takes is Takes.JOB else "Session"
        change = f"write {'async ' * bool(for_async)}def, or " * has_other_color
        raise ConfigError(
            f"handler {name_of(handler)}: can't take {shorten(annotation)};"
            f" {change}let it take ({'Async' * is_async(handler)}{first},"
            f" {'Sequence[Message]' if takes is Takes.MANY else 'Message'}), or"
            " register it with @consumer.handles, @consumer.handles_batch or"
            " @consumer.job"
        )
    if _is_session(annotation) or _is_connection(annotation):
        return Role.SESSION
    if _is(annotation, Job, AsyncJob):
        return Role.JOB
    if takes is Takes.MANY:
        if typing.get_origin(annotation) not in _MANY:
            return None
        (annotation,) = typing.get_args(annotation)
    if _is(annotation, Message) or annotation in _OPEN:
        return Role.MESSAGE
    if annotation is bytes:
        return Role.PAYLOAD
    if annotation in (dict, list):
        return _Plain(annotation)
    return validator_of(annotation) if _is_payload(annotation) else None


def _for_async(annotation: Any) -> bool | None:
    """Return whether it is a session, connection or job for `async def`; None: none."""
    if _is_connection(annotation):
        return _is_connection(annotation, psycopg.AsyncConnection)
    if _is(annotation, Job, AsyncJob):
        return _is(annotation, AsyncJob)
    return _is_async_session(annotation) if _is_session(annotation) else None


def _is_misplaced(annotation: Any, takes: Takes) -> bool:
    """Return whether another kind of handler takes what is annotated."""
    is_job = _is(annotation, Job, AsyncJob)
    if is_job or _is_session(annotation) or _is_connection(annotation):
        return is_job != (takes is Takes.JOB)
    is_many = _is_many(annotation)
    return (is_many or _is(annotation, Message)) and is_many != (takes is Takes.MANY)


def _check(
    handler: Callable[..., Any], takes: Takes, inner: Collection[Argument]
) -> None:
    roles = list(_roles(inner))
    payloads = len(inner) - len(roles) + roles.count(Role.PAYLOAD)
    if payloads > 1 or len({*roles}) < len(roles):
        _bind(handler, takes, 2)
        raise ConfigError(
            f"handler {name_of(handler)}: takes the same argument twice; let it take"
            f" {takes.value}, and optionally a payload"
        )
    # With fewer arguments, the error says what is missing.
    _bind(handler, takes, max(2, len(inner)))


def _roles(arguments: Collection[Argument]) -> list[Role]:
    return [argument for argument in arguments if isinstance(argument, Role)]


def _bind(handler: Callable[..., Any], takes: Takes, count: int) -> None:
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):
        return  # a builtin without a signature
    try:
        signature.bind(*range(count))
    except TypeError:
        names = list(signature.parameters)
        many = "1 argument" if len(names) == 1 else f"{len(names)} arguments"
        is_method = names[:1] == ["self"]
        raise ConfigError(
            f"handler {name_of(handler)}({', '.join(names)}): must accept "
            f"{takes.value}, but takes {many}"
            + "; pass the method of an object"
            * is_method
        ) from None


def _is_payload(annotation: Any) -> bool:
    """Return whether JSON can be decoded to it, as far as its kind shows."""
    origin = typing.get_origin(annotation)
    if origin in _UNIONS:
        return any(_is_payload(one) for one in typing.get_args(annotation))
    if origin is typing.Annotated:
        return _is_payload(typing.get_args(annotation)[0])
    kind = origin or annotation
    return (
        kind in (dict, list, collections.abc.Mapping, collections.abc.Sequence)
        or dataclasses.is_dataclass(kind)
        or is_typeddict(kind)
        or any(hasattr(kind, name) for name in _MODEL)
    )


def _model(annotation: Any, takes: Takes) -> type | None:
    """Return the class of a payload, alone or of each in a batch."""
    if takes is Takes.MANY and typing.get_origin(annotation) in _MANY:
        annotation = next(iter(typing.get_args(annotation)), None)
    is_one = isinstance(annotation, type) and _is_payload(annotation)
    return annotation if is_one and annotation is not Message else None


def _is_many(annotation: object) -> bool:
    return typing.get_origin(annotation) in (*_MANY, tuple) and any(
        _is(one, Message) for one in typing.get_args(annotation)
    )


def _is(annotation: object, *kinds: type) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, kinds)


def _is_connection(annotation: object, *kinds: type) -> bool:
    kind = typing.get_origin(annotation) or annotation
    return _is(kind, *(kinds or (psycopg.Connection, psycopg.AsyncConnection)))


def _is_session(annotation: object) -> bool:
    return _is(annotation, Session) or _is_async_session(annotation)


def _is_async_session(annotation: object) -> bool:
    # Compare names, because AsyncSession can't be imported without greenlet.
    return isinstance(annotation, type) and any(
        kind.__name__ == "AsyncSession" and kind.__module__.startswith("sqlalchemy.")
        for kind in annotation.__mro__
    )
