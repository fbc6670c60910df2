"""Describe the messages of an application as an AsyncAPI 3 document, and compare two.

`compare` finds changes that break consumers of the messages: code that was written for
the old document must be able to read what the new one allows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from outbox.payload import json_codec as codec

VERSION: Final = "3.0.0"
_LOWER_BOUNDS: Final = ("minimum", "exclusiveMinimum", "minLength", "minItems")
_UPPER_BOUNDS: Final = ("maximum", "exclusiveMaximum", "maxLength", "maxItems")
_REF: Final = "#/components/schemas/"


@dataclass(frozen=True, slots=True)
class MessageSchema:
    """The payloads of a topic in one version.

    Attributes:
        schema: a JSON Schema; None if the payloads are unknown. Its `$defs` are moved
            to the document's components.
        is_received: whether the application handles these messages, or only sends them.
    """

    topic: str
    version: int
    schema: Mapping[str, Any] | None
    is_received: bool


def document(
    title: str, version: str, messages: Sequence[MessageSchema]
) -> dict[str, Any]:
    """Return an AsyncAPI document with one channel for each topic."""
    channels: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    described: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    for message in sorted(messages, key=lambda m: (m.topic, m.version)):
        channel = _name(message.topic)
        name = f"{channel}.v{message.version}"
        described[name] = {"name": message.topic, "contentType": codec.JSON}
        if message.schema is not None:
            schemas |= _components(name, message.schema)
            described[name]["payload"] = {"$ref": f"{_REF}{name}"}
        channels.setdefault(channel, {"address": message.topic, "messages": {}})
        channels[channel]["messages"][name] = {"$ref": f"#/components/messages/{name}"}
        action = "receive" if message.is_received else "send"
        operations[f"{action}.{channel}"] = {
            "action": action,
            "channel": {"$ref": f"#/channels/{channel}"},
        }
    return {
        "asyncapi": VERSION,
        "info": {"title": title, "version": version},
        "defaultContentType": codec.JSON,
        "channels": channels,
        "operations": operations,
        "components": {"messages": described, "schemas": schemas},
    }


def _name(topic: str) -> str:
    """Return a topic as a key of components: letters, digits, dots and dashes."""
    return "".join(
        c if c.isascii() and (c.isalnum() or c in ".-") else "_" for c in topic
    )


def _components(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    own = {key: value for key, value in schema.items() if key != "$defs"}
    found = {f"{name}.{key}": inner for key, inner in schema.get("$defs", {}).items()}
    return {key: _moved(inner, name) for key, inner in {name: own, **found}.items()}


def _moved(schema: Any, name: str) -> Any:
    """Let references to `$defs` lead to the document's components."""
    if isinstance(schema, list):
        return [_moved(inner, name) for inner in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(inner, name) for key, inner in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/$defs/"):
        moved["$ref"] = f"{_REF}{name}.{reference.removeprefix('#/$defs/')}"
    return moved


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return what in `new` breaks a consumer or producer of `old`; empty if nothing.

    A field that was removed, renamed or became required, a type or an enum that became
    narrower, and a message that is gone.
    """
    before = _schemas_of(old)
    after = _schemas_of(new)
    problems = []
    for name, schema in before.items():
        if name not in after:
            problems.append(f"{name}: is gone")
        elif schema is not None and after[name] is not None:
            problems += _Comparison(old, new).compare(name, schema, after[name])
    return problems


def _schemas_of(document: Mapping[str, Any]) -> dict[str, Any]:
    messages = document.get("components", {}).get("messages", {})
    return {name: message.get("payload") for name, message in messages.items()}


class _Comparison:
    """Compares schemas of two documents, field by field."""

    def __init__(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        self._documents = (old, new)
        self._seen: set[str] = set()

    def compare(self, path: str, old: Any, new: Any) -> Iterator[str]:
        """Yield what became narrower, with its path."""
        references = f"{_reference(old)} {_reference(new)}"
        if _reference(old) and _reference(new):
            if references in self._seen:
                return  # a recursive schema
            self._seen.add(references)
        old, new = self._resolve(old, 0), self._resolve(new, 1)
        if old == new or new in (True, {}):
            return
        if not isinstance(old, Mapping) or not isinstance(new, Mapping):
            yield f"{path}: is refused" if new is False else f"{path}: has a new schema"
            return
        yield from self._choices(path, old, new)
        yield from self._fields(path, old, new)
        yield from _bounds(path, old, new)
        if "items" in old and "items" in new:
            yield from self.compare(f"{path}[]", old["items"], new["items"])

    def _choices(
        self, path: str, old: Mapping[str, Any], new: Mapping[str, Any]
    ) -> Iterator[str]:
        if "type" in new and not {"anyOf", "oneOf"} & {*old}:
            gone = (_types(old) or {"any"}) - _types(new)
            if gone:
                yield f"{path}: the type {', '.join(sorted(gone))} is gone"
        allowed, before = _values(new), _values(old)
        if allowed is not None and (
            before is None or any(value not in allowed for value in before)
        ):
            yield f"{path}: allows fewer values"
        for kind in ("anyOf", "oneOf"):
            if kind in old:
                for number, option in enumerate(old[kind], 1):
                    if not self._fits_one(option, new.get(kind, [new])):
                        yield f"{path}: alternative {number} is gone"
            elif kind in new and not self._fits_one(old, new[kind]):
                yield f"{path}: has a new schema"

    def _fits_one(self, old: Any, options: Sequence[Any]) -> bool:
        return any(
            next(_Comparison(*self._documents).compare("", old, option), None) is None
            for option in options
        )

    def _fields(
        self, path: str, old: Mapping[str, Any], new: Mapping[str, Any]
    ) -> Iterator[str]:
        before, after = old.get("properties", {}), new.get("properties", {})
        for name, schema in before.items():
            if name not in after:
                yield f"{path}.{name}: was removed"
            else:
                yield from self.compare(f"{path}.{name}", schema, after[name])
        required = {*new.get("required", ())} - {*old.get("required", ())}
        for name in sorted(required):
            yield f"{path}.{name}: became required"

    def _resolve(self, schema: Any, which: int) -> Any:
        while (name := _reference(schema)) is not None:
            schemas = self._documents[which].get("components", {}).get("schemas", {})
            schema = schemas.get(name, {})
        return schema


def _reference(schema: Any) -> str | None:
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    return None if reference is None else str(reference).removeprefix(_REF)


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema allows; None if it doesn't list them."""
    if "const" in schema:
        return [schema["const"]]
    values: list[Any] | None = schema.get("enum")
    return values


def _types(schema: Mapping[str, Any]) -> set[str]:
    kinds = schema.get("type", [])
    found = {kinds} if isinstance(kinds, str) else {*kinds}
    return found | {"integer"} if "number" in found else found


def _bounds(path: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for name in _LOWER_BOUNDS:
        if name in new and (name not in old or new[name] > old[name]):
            yield f"{path}: {name} rose to {new[name]}"
    for name in _UPPER_BOUNDS:
        if name in new and (name not in old or new[name] < old[name]):
            yield f"{path}: {name} fell to {new[name]}"
    for name in ("pattern", "format"):
        if name in new and old.get(name) != new[name]:
            yield f"{path}: has a new {name}"
    if new.get("additionalProperties") is False and (
        old.get("additionalProperties") is not False
    ):
        yield f"{path}: allows no other fields"
