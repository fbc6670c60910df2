"""Describe the messages of an application as an AsyncAPI 3 document, and compare two.

`compare` finds incompatible changes, whomever they break: a field that may hold more
breaks those who read it, one that may hold less those who write it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from json import dumps
from typing import Any, Final

from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.payload import json_codec as codec

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
_ALTERNATIVES: Final = ("allOf", "anyOf", "oneOf")
_STEPS: Final = {"items": "[]", "prefixItems": "[]", "additionalProperties": ".*"}
"""The step that a nested value adds to the path."""
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
    before = _payloads_of(old)
    after = _payloads_of(new)
    problems = []
    for name, schema in before.items():
        if name not in after:
            problems.append(f"{name}: was removed")
        else:
            problems += _changes(name, schema, after[name])
    return problems


def _payloads_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the payloads' schemas by message, as `_plain` does."""
    try:
        messages = document["components"]["messages"]
        schemas = document["components"].get("schemas", {})
        payloads = {name: it.get("payload", {}) for name, it in messages.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            "the document has no components.messages; compare with what pillarbox "
            "asyncapi printed"
        ) from error
    return {name: _plain(schema, schemas) for name, schema in payloads.items()}


def _plain(schema: Any, schemas: Mapping[str, Any], above: tuple[str, ...] = ()) -> Any:
    """Return a schema without references and annotations, and in a stable order.

    Args:
        above: the references that led to it: it can be recursive.
    """
    if isinstance(schema, list):
        return [_plain(one, schemas, above) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    if "$ref" in schema:
        name = str(schema["$ref"]).removeprefix(_REF)
        if name in above:
            return {"recursive": len(above) - above.index(name)}
        found = schemas.get(name, {})
        if isinstance(found, Mapping):
            found = {**found, **{key: schema[key] for key in schema if key != "$ref"}}
        return _plain(found, schemas, (*above, name))
    plain: dict[str, Any] = {}
    for key in schema.keys() - _ANNOTATIONS:
        value = schema[key]
        if key in _OF_NAMES and isinstance(value, Mapping):
            value = {it: _plain(value[it], schemas, above) for it in value}
        elif key in ("enum", "type") and isinstance(value, list):
            value = sorted(value, key=dumps)
        elif key not in ("const", "enum"):
            value = _plain(value, schemas, above)
        if key in _ALTERNATIVES:
            value = sorted(value, key=_order)
        plain[key] = value
    return plain


def _order(plain: Any) -> tuple[str, str]:
    """Sort alternatives by their type: a new optional field must not change places."""
    kind = plain.get("type") if isinstance(plain, Mapping) else None
    return dumps(kind), dumps(plain, sort_keys=True)


def _changes(path: str, old: Any, new: Any) -> Iterator[str]:
    """Yield the incompatible changes from one plain schema to another."""
    before, after = _keywords(old), _keywords(new)
    yield from _changes_of_fields(path, before, after)
    was: dict[str, Any] = {}
    now: dict[str, Any] = {}
    for keyword in sorted(({*before} | {*after}) - {"properties", "required"}):
        parts = _parts(keyword, before), _parts(keyword, after)
        if parts[0] and len(parts[0]) == len(parts[1]):
            for one, two in zip(*parts, strict=True):
                yield from _changes(f"{path}{_STEPS.get(keyword, '')}", one, two)
        elif _text(keyword, before) != _text(keyword, after):
            was |= {keyword: before[keyword]} if keyword in before else {}
            now |= {keyword: after[keyword]} if keyword in after else {}
    if was or now:
        yield f"{path}: was {dumps(was)}, is {dumps(now)}"


def _changes_of_fields(
    path: str, old: Mapping[str, Any], new: Mapping[str, Any]
) -> Iterator[str]:
    before, after = old.get("properties", {}), new.get("properties", {})
    for name, schema in before.items():
        if name not in after:
            yield f"{path}.{name}: was removed"
        else:
            yield from _changes(f"{path}.{name}", schema, after[name])
    required, was_required = {*new.get("required", ())}, {*old.get("required", ())}
    for name in sorted(required - was_required):
        yield f"{path}.{name}: became required"
    for name in sorted((was_required - required) & {*after}):
        yield f"{path}.{name}: became optional"


def _keywords(schema: Any) -> Mapping[str, Any]:
    """Return what a schema says about values; `true` says nothing."""
    if isinstance(schema, Mapping):
        return schema
    return {} if schema else {"not": {}}


def _parts(keyword: str, schema: Mapping[str, Any]) -> list[Any]:
    """Return the schemas inside a keyword."""
    value = schema.get(keyword)
    if keyword in ("items", "additionalProperties"):
        return [value] if isinstance(value, Mapping) else []
    return list(value or ()) if keyword in {"prefixItems", *_ALTERNATIVES} else []


def _text(keyword: str, schema: Mapping[str, Any]) -> str | None:
    """Return a keyword's value as text, which tells 1 from true; None: absent."""
    return dumps(schema[keyword], sort_keys=True) if keyword in schema else None
