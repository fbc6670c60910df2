"""Describe the messages of an application as an AsyncAPI 3 document, and compare two.

`compare` finds incompatible changes, whomever they break: a field that may hold more
breaks those who read it, one that may hold less those who write it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from json import dumps
from typing import Any, Final

from outbox.errors import ConfigError
from outbox.payload import json_codec as codec

VERSION: Final = "3.0.0"
_ANNOTATIONS: Final = frozenset(
    {
        *("$comment", "$defs", "$id", "$schema", "title", "description", "examples"),
        *("default", "deprecated", "readOnly", "writeOnly", "discriminator"),
    }
)
"""Keywords that don't say what a value may be."""
_OF_NAMES: Final = ("properties", "patternProperties", "dependentSchemas")
"""Keywords whose value has names that are chosen, each with a schema."""
_STEPS: Final = {"items": "[]", "prefixItems": "[]", "additionalProperties": ".*"}
"""What a value inside another one adds to the path."""
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
    """Return the incompatible changes from `old` to `new`; empty if there is none.

    New messages and new optional fields are compatible, and so are changes of titles,
    descriptions and defaults. Any other change isn't, whether a field may hold more
    than before or less.

    Raises:
        ConfigError: a document doesn't describe its messages as `document` does.
    """
    before = _schemas_of(old)
    after = _schemas_of(new)
    problems = []
    for name, schema in before.items():
        if name not in after:
            problems.append(f"{name}: is gone")
        else:
            problems += _Comparison(old, new).compare(name, schema, after[name])
    return problems


def _schemas_of(document: Mapping[str, Any]) -> dict[str, Any]:
    try:
        messages = document["components"]["messages"]
        return {name: message.get("payload", {}) for name, message in messages.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            "the document has no components.messages; compare with what pillarbox "
            "asyncapi printed"
        ) from error


class _Comparison:
    """Compares schemas of two documents, field by field."""

    def __init__(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        self._documents = (old, new)
        self._seen: set[tuple[str | None, str | None]] = set()

    def compare(self, path: str, old: Any, new: Any) -> Iterator[str]:
        """Yield the incompatible changes, each with its path."""
        references = (_reference(old), _reference(new))
        if None not in references:
            if references in self._seen:
                return  # a recursive schema
            self._seen.add(references)
        before, after = self._keywords(old, 0), self._keywords(new, 1)
        yield from self._fields(path, before, after)
        was: dict[str, Any] = {}
        now: dict[str, Any] = {}
        for keyword in sorted(({*before} | {*after}) - {"properties", "required"}):
            parts = self._parts(keyword, before, 0), self._parts(keyword, after, 1)
            if parts[0] and len(parts[0]) == len(parts[1]):
                inner = f"{path}{_STEPS.get(keyword, '')}"
                for one, two in zip(*parts, strict=True):
                    yield from self.compare(inner, one, two)
            elif self._text(keyword, before, 0) != self._text(keyword, after, 1):
                was |= {keyword: before[keyword]} if keyword in before else {}
                now |= {keyword: after[keyword]} if keyword in after else {}
        if was or now:
            yield f"{path}: was {dumps(was)}, is {dumps(now)}"

    def _fields(
        self, path: str, old: Mapping[str, Any], new: Mapping[str, Any]
    ) -> Iterator[str]:
        before, after = old.get("properties", {}), new.get("properties", {})
        for name, schema in before.items():
            if name not in after:
                yield f"{path}.{name}: was removed"
            else:
                yield from self.compare(f"{path}.{name}", schema, after[name])
        required, was_required = {*new.get("required", ())}, {*old.get("required", ())}
        for name in sorted(required - was_required):
            yield f"{path}.{name}: became required"
        for name in sorted((was_required - required) & {*after}):
            yield f"{path}.{name}: became optional"

    def _keywords(self, schema: Any, which: int) -> Mapping[str, Any]:
        """Return what a schema says about values; `true` says nothing."""
        while (name := _reference(schema)) is not None:
            schema = self._referenced(schema, name, which)
        if not isinstance(schema, Mapping):
            return {} if schema else {"not": {}}
        return {key: schema[key] for key in schema if key not in _ANNOTATIONS}

    def _referenced(self, schema: Mapping[str, Any], name: str, which: int) -> Any:
        """Return what a reference leads to, with the keywords that stand beside it."""
        schemas = self._documents[which].get("components", {}).get("schemas", {})
        found = schemas.get(name, {})
        beside = {key: schema[key] for key in schema if key != "$ref"}
        return {**found, **beside} if isinstance(found, Mapping) else found

    def _parts(self, keyword: str, schema: Mapping[str, Any], which: int) -> list[Any]:
        """Return the schemas inside a keyword, alternatives in a stable order."""
        value = schema.get(keyword)
        if keyword in ("items", "additionalProperties"):
            return [value] if isinstance(value, Mapping) else []
        if keyword in ("allOf", "anyOf", "oneOf"):
            plain = {id(it): self._plain(it, which) for it in value or ()}
            return sorted(value or (), key=lambda it: _order(plain[id(it)]))
        return list(value or ()) if keyword == "prefixItems" else []

    def _text(self, keyword: str, schema: Mapping[str, Any], which: int) -> str | None:
        """Return a keyword's value as text, which tells 1 from true; None: absent."""
        if keyword not in schema:
            return None
        value = self._plain({keyword: schema[keyword]}, which)[keyword]
        if keyword in ("enum", "type") and isinstance(value, list):
            value = sorted(value, key=dumps)
        return dumps(value, sort_keys=True)

    def _plain(
        self, schema: Any, which: int, above: frozenset[str] = frozenset()
    ) -> Any:
        """Return a schema without references, and without what says nothing.

        Args:
            above: the references that led to it: it can be recursive.
        """
        if isinstance(schema, list):
            return [self._plain(one, which, above) for one in schema]
        if not isinstance(schema, Mapping):
            return schema
        name = _reference(schema)
        if name is not None:
            if name in above:
                return "recursive"
            found = self._referenced(schema, name, which)
            return self._plain(found, which, above | {name})
        plain: dict[str, Any] = {}
        for key in schema.keys() - _ANNOTATIONS:
            value = schema[key]
            if key in _OF_NAMES and isinstance(value, Mapping):
                value = {it: self._plain(value[it], which, above) for it in value}
            elif key not in ("const", "enum"):
                value = self._plain(value, which, above)
            plain[key] = value
        return plain


def _reference(schema: Any) -> str | None:
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    return None if reference is None else str(reference).removeprefix(_REF)


def _order(plain: Any) -> tuple[str, str]:
    """Sort alternatives by their type: a new optional field must not change places."""
    kind = plain.get("type") if isinstance(plain, Mapping) else None
    return dumps(kind), dumps(plain, sort_keys=True)
