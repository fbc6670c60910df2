"""Turn Python objects into JSON types, as Pydantic's JSON mode does.

    datetime, time, date ──▶ ISO 8601; UTC as Z
    timedelta ──▶ ISO 8601: PT1M30S
    UUID, Decimal ──▶ str        Enum ──▶ its value
    bytes ──▶ str, if they are UTF-8        set, frozenset, deque ──▶ list
    a Pydantic model ──▶ its model_dump(mode="json", by_alias=True)
    a dataclass, attrs class, msgspec.Struct ──▶ a dict of its fields

The result is the same whether Pydantic is installed or not. Register how to encode a
class of your own:

    @jsonable.register
    def _(money: Money) -> object:
        return {"amount": money.amount, "currency": money.currency}
"""

import dataclasses
from collections import deque
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import singledispatch
from typing import Any, Final
from uuid import UUID

from pillarbox.outbox.errors import CodecError

_YEAR: Final = 365
_MASKED: Final = repr("*" * 10)
_BASIC: Final = (str, int, float, bool, type(None))


@singledispatch
def jsonable(value: object) -> object:
    """Return an object as JSON types, or as objects that are encoded in turn.

    Args:
        value: an object that `json` can't encode by itself.

    Raises:
        TypeError: there is no encoding for its class.
        ValueError: its value has no such encoding.
    """
    if is_dumped(type(value)):
        return _dump_pydantic(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    attributes: Any = getattr(type(value), "__attrs_attrs__", None)
    if attributes is not None:
        return {field.name: getattr(value, field.name) for field in attributes}
    if hasattr(type(value), "__struct_fields__"):
        return _dump_struct(value)
    raise TypeError(f"{type(value).__name__} is not known")


@jsonable.register(datetime)
@jsonable.register(time)
def _(value: datetime | time) -> str:
    text = value.isoformat()
    if value.utcoffset() == timedelta(0):
        return text.removesuffix("+00:00") + "Z"
    return text


@jsonable.register(date)
def _(value: date) -> str:
    return value.isoformat()


@jsonable.register(timedelta)
def _(value: timedelta) -> str:
    sign, value = ("-", -value) if value < timedelta(0) else ("", value)
    years, days = divmod(value.days, _YEAR)
    hours, rest = divmod(value.seconds, 3600)
    minutes, seconds = divmod(rest, 60)
    fraction = f".{value.microseconds:06}".rstrip("0").rstrip(".")
    day = _parts((years, "Y"), (days, "D"))
    clock = _parts((hours, "H"), (minutes, "M"))
    if seconds or fraction or not (day or clock):
        clock += f"{seconds}{fraction}S"
    return f"{sign}P{day}{'T' if clock else ''}{clock}"


@jsonable.register(UUID)
@jsonable.register(Decimal)
def _(value: UUID | Decimal) -> str:
    return str(value)


@jsonable.register
def _(value: Enum) -> object:
    return value.value


@jsonable.register
def _(value: bytes) -> str:
    return value.decode()


@jsonable.register(set)
@jsonable.register(frozenset)
@jsonable.register(deque)
def _(value: Any) -> list[object]:
    return list(value)


def plain(value: object, path: str = "") -> object:
    """Return `value` in JSON types alone, with keys that are text.

    Raises:
        TypeError, ValueError: as `jsonable`; the text begins with the path to the field
            that can't be encoded.
    """
    if isinstance(value, str):
        return _text(value, path)
    if isinstance(value, Mapping):
        return _object(value, path)
    if isinstance(value, list | tuple):
        return [plain(inner, f"{path}[{n}]") for n, inner in enumerate(value)]
    if isinstance(value, float) and value - value != 0:
        raise ValueError(f"{_at(path)}a float that isn't finite has no JSON")
    if isinstance(value, _BASIC) and not isinstance(value, Enum):
        return value
    try:
        encoded = jsonable(value)
    except (TypeError, ValueError) as error:
        kind = type(value).__name__
        again = TypeError if isinstance(error, TypeError) else ValueError
        raise again(f"{_at(path)}{kind} can't be encoded") from error
    return plain(encoded, path)


def _text(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{_at(path)}{error.reason}") from error
    return str.__str__(value)


def _object(value: Mapping[Any, object], path: str) -> dict[str, object]:
    members: dict[str, object] = {}
    for key, inner in value.items():
        name = _key(key, path)
        if name in members:
            raise ValueError(f"{_at(path)}two keys are {name!r} in JSON")
        members[name] = plain(inner, f"{path}.{name}" if path else name)
    return members


def _key(key: object, path: str) -> str:
    name = plain(key, f"a key of {path}" if path else "a key")
    if isinstance(name, dict | list):
        raise TypeError(f"{_at(path)}a {type(key).__name__} can't be a key")
    if name is None or isinstance(name, bool):
        return {None: "null", True: "true", False: "false"}[name]
    return str(name)


def _at(path: str) -> str:
    return f"{path}: " if path else ""


def _parts(*parts: tuple[int, str]) -> str:
    return "".join(f"{number}{unit}" for number, unit in parts if number)


def is_dumped(kind: type) -> bool:
    """Return whether pydantic knows all fields of a class, and so writes it."""
    # A standard dataclass inherits that of its base, which lacks its own fields.
    if dataclasses.is_dataclass(kind):
        return "__pydantic_serializer__" in vars(kind)
    return hasattr(kind, "__pydantic_serializer__")


def _dump_pydantic(value: Any) -> object:
    if hasattr(value, "model_dump"):
        dumped = value.model_dump(mode="json", by_alias=True)
    else:
        dump = type(value).__pydantic_serializer__.to_python
        dumped = dump(value, mode="json", by_alias=True)
    if _MASKED in repr(dumped):
        raise CodecError(
            "payload",
            type(value),
            "has a secret, which pydantic would write as asterisks",
            "give its field a field_serializer that returns a value to send, or"
            " exclude it with exclude=True",
        )
    return dumped


def _dump_struct(value: object) -> object:
    import msgspec

    kept = (date, datetime, time, timedelta, Decimal, UUID)
    return msgspec.to_builtins(value, builtin_types=kept, enc_hook=jsonable)
