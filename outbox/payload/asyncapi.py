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
            problems += _differences(
                name, _plain(schema, old), _plain(after[name], new)
            )
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


def _differences(path: str, old: Any, new: Any) -> Iterator[str]:
    """Yield the incompatible changes between plain schemas, each with its path."""
    old, new = ({} if schema is True else schema for schema in (old, new))
    if not isinstance(old, dict) or not isinstance(new, dict):
        if old != new:
            yield f"{path}: was {dumps(old)}, is {dumps(new)}"
        return
    yield from _differing_fields(path, old, new)
    was: dict[str, Any] = {}
    now: dict[str, Any] = {}
    for keyword in sorted(({*old} | {*new}) - {"properties", "required"}):
        before, after = _parts(keyword, old), _parts(keyword, new)
        if before and len(before) == len(after):
            inner = f"{path}{_STEPS.get(keyword, '')}"
            for one, two in zip(before, after, strict=True):
                yield from _differences(inner, one, two)
        elif _text(keyword, old) != _text(keyword, new):
            was |= {keyword: old[keyword]} if keyword in old else {}
            now |= {keyword: new[keyword]} if keyword in new else {}
    if was or now:
        yield f"{path}: was {dumps(was)}, is {dumps(now)}"


def _differing_fields(
    path: str, old: Mapping[str, Any], new: Mapping[str, Any]
) -> Iterator[str]:
    before, after = old.get("properties", {}), new.get("properties", {})
    for name, schema in before.items():
        if name not in after:
            yield f"{path}.{name}: was removed"
        else:
            yield from _differences(f"{path}.{name}", schema, after[name])
    required, was_required = {*new.get("required", ())}, {*old.get("required", ())}
    for name in sorted(required - was_required):
        yield f"{path}.{name}: became required"
    for name in sorted((was_required - required) & {*after}):
        yield f"{path}.{name}: became optional"


def _parts(keyword: str, schema: Mapping[str, Any]) -> list[Any]:
    """Return the schemas inside a keyword, alternatives in a stable order."""
    value = schema.get(keyword)
    if keyword in ("items", "additionalProperties"):
        return [value] if isinstance(value, Mapping) else []
    if keyword in ("allOf", "anyOf", "oneOf"):
        return sorted(value or (), key=_order)
    return list(value or ()) if keyword == "prefixItems" else []


def _text(keyword: str, schema: Mapping[str, Any]) -> str | None:
    """Return a keyword's value as text, which tells 1 from true; None: absent."""
    if keyword not in schema:
        return None
    value = schema[keyword]
    if keyword in ("enum", "type") and isinstance(value, list):
        value = sorted(value, key=dumps)
    return dumps(value, sort_keys=True)


def _plain(
    schema: Any, document: Mapping[str, Any], above: frozenset[str] = frozenset()
) -> Any:
    """Return a schema without references, and without what says nothing.

    Args:
        above: the references that led to it: it can be recursive.
    """
    if isinstance(schema, list):
        return [_plain(one, document, above) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    name = _reference(schema)
    if name is not None:
        if name in above:
            return "recursive"
        found = document["components"].get("schemas", {}).get(name, {})
        beside = {key: schema[key] for key in schema if key != "$ref"}
        found = {**found, **beside} if isinstance(found, Mapping) else found
        return _plain(found, document, above | {name})
    plain: dict[str, Any] = {}
    for key in schema.keys() - _ANNOTATIONS:
        value = schema[key]
        if key in _OF_NAMES and isinstance(value, Mapping):
            value = {it: _plain(value[it], document, above) for it in value}
        elif key not in ("const", "enum"):
            value = _plain(value, document, above)
        plain[key] = value
    return plain


def _reference(schema: Any) -> str | None:
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    return None if reference is None else str(reference).removeprefix(_REF)


def _order(plain: Any) -> tuple[str, str]:
    """Sort alternatives by their type: a new optional field must not change places."""
    kind = plain.get("type") if isinstance(plain, Mapping) else None
    return dumps(kind), dumps(plain, sort_keys=True)
