"""The schema registry: the schemas of payloads by topic and version.

`add` rejects a message of a registered topic if its payload doesn't match the schema; a
consumer never calls a handler with such a payload.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol, TypeVar, get_origin

from pillarbox.outbox.errors import (
    ConfigError,
    InvalidMessageError,
    check_type,
    shorten,
)
from pillarbox.outbox.message import Message
from pillarbox.outbox.payload import json_codec as codec

T = TypeVar("T", bound=type)

_JSON_SCHEMA: Final = ("json_schema", "JsonSchemaValidator", "jsonschema")
_MSGSPEC: Final = ("msgspec", "MsgspecValidator", "msgspec")
_PYDANTIC: Final = ("pydantic", "PydanticValidator", "pydantic")


class PayloadError(Exception):
    """A payload doesn't match its schema.

    Args:
        problem: what is wrong and where, without the values, because it is logged.
    """


class Validator(Protocol):
    """Validates and reads payloads of one schema. Safe to share between threads."""

    def load(self, payload: bytes) -> Any:
        """Read JSON as an instance of the schema.

        Raises:
            PayloadError: the payload doesn't match the schema, or isn't JSON.
        """

    def check(self, payload: bytes) -> object:
        """Refuse JSON that isn't as this process writes it.

        Raises:
            PayloadError: the payload doesn't match the schema, or isn't JSON.
        """

    def json_schema(self) -> Mapping[str, Any]:
        """Return the schema as JSON Schema."""


class SchemaRegistry:
    """Schemas by topic and version. Register at import, then share between threads.

    Args:
        strict: whether `check` refuses topics that have no schema, so that a mistyped
            topic is found when a message is added.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self._topics: dict[str, dict[int, Validator]] = {}
        self._classes: dict[tuple[str, int], type] = {}
        self._events: dict[type, tuple[str, int]] = {}

    def event(self, topic: str, *, version: int = 1) -> Callable[[T], T]:
        """Bind a class to the topic of its instances, and register it as the schema.

        Args:
            topic: the exact topic.
            version: the `schema_version` of the messages.

        Raises:
            ConfigError: as `register`, or the class is bound to another topic already.
        """
        check_type("topic", topic, str, 'write @event("orders.placed")')

        def bind(kind: T) -> T:
            if kind in self._events:
                raise ConfigError(
                    f"{kind.__name__}: already bound to topic"
                    f" {shorten(self._events[kind][0])}; define a class for each"
                    " topic and version"
                )
            self.register(topic, kind, version=version)
            self._events[kind] = (topic, version)
            return kind

        return bind

    def topic_of(self, kind: type) -> tuple[str, int] | None:
        """Return the topic and version of a class; None if it isn't bound."""
        return self._events.get(kind)

    def classes(self, topic: str, version: int | None) -> list[type]:
        """Return the classes that were registered for a topic.

        Args:
            version: one version; None: all versions.
        """
        return [
            kind
            for (of, number), kind in self._classes.items()
            if of == topic and version in (None, number)
        ]

    def register(self, topic: str, schema: Any, *, version: int = 1) -> None:
        """Register the schema of a topic's payloads in one version.

        Args:
            topic: the exact topic.
            schema: a JSON Schema as a dict (by jsonschema), a pydantic model, a
                msgspec struct, or a dataclass, TypedDict or other annotated type (by
                pydantic or, if that isn't installed, by msgspec).
            version: the `schema_version` of the messages.

        Raises:
            ConfigError: an argument is invalid, the schema's library isn't installed,
                or this topic and version already have a schema.
        """
        if not topic or "*" in topic:
            raise ConfigError(
                f"topic {shorten(topic)}: a schema is registered for one topic; write "
                "it in full"
            )
        if type(version) is not int or version < 1:
            raise ConfigError(
                f"version {shorten(version)}: must be a whole number from 1"
            )
        versions = self._topics.setdefault(topic, {})
        if version in versions:
            known = self._classes.get((topic, version))
            which = (
                "" if known is None else f", {known.__module__}.{known.__qualname__}"
            )
            raise ConfigError(
                f"topic {shorten(topic)}: version {version} already has a"
                f" schema{which}; register a new one under a new version; if it is"
                " the same, import its file under one name only, also from a script"
            )
        versions[version] = validator_of(schema)
        if isinstance(schema, type):
            self._classes[topic, version] = schema

    def check(self, message: Message) -> None:
        """Check a message that is to be added.

        Raises:
            InvalidMessageError: its version isn't registered, the payload doesn't match
                its schema, or the registry is strict and the topic has none.
        """
        versions = self._topics.get(message.topic)
        if versions is None:
            if self.strict:
                raise InvalidMessageError(
                    "topic",
                    message.topic,
                    "isn't declared, and the registry is strict",
                    "correct it, or declare it with @event or REGISTRY.register",
                )
            return
        if message.schema_version not in versions:
            raise InvalidMessageError(
                "schema_version",
                message.schema_version,
                f"isn't registered for topic {message.topic!r}",
                f"pass one of {', '.join(map(str, sorted(versions)))}, or register it",
            )
        self._validated(message, is_new=True)

    def schemas(self) -> Iterator[tuple[str, int, Validator]]:
        """Yield the topics and versions with their schemas."""
        for topic, versions in self._topics.items():
            for version, validator in versions.items():
                yield topic, version, validator

    def knows(self, message: Message) -> bool:
        """Return whether there is a schema for the message's topic and version."""
        return message.schema_version in self._topics.get(message.topic, {})

    def load(self, message: Message) -> Any:
        """Decode a payload into its schema's type: a model, a struct or a dict.

        Without a schema, decode it as JSON.

        Raises:
            InvalidMessageError: the payload doesn't match the schema, or isn't JSON.
        """
        return self._validated(message)

    def _validated(self, message: Message, *, is_new: bool = False) -> Any:
        validator = self._topics.get(message.topic, {}).get(message.schema_version)
        if validator is None:
            return message.json()
        if not codec.is_json(message.content_type):
            raise InvalidMessageError(
                "content_type",
                message.content_type,
                f"isn't JSON, and topic {message.topic!r} has a schema",
                "pass the payload as an object, or with content_type application/json",
            )
        try:
            validate = validator.check if is_new else validator.load
            return validate(message.payload)
        except PayloadError as error:
            raise InvalidMessageError(
                "payload",
                type(message.payload),
                f"doesn't fit version {message.schema_version} of topic "
                f"{message.topic!r}: {error}",
                "correct it, or register a new version",
            ) from None


REGISTRY: Final = SchemaRegistry()
"""The registry that `add` and a `Consumer` use by default."""

event: Final = REGISTRY.event
"""Bind a class to a topic in `REGISTRY`, so that `add` takes its instances.

    @event("orders.placed", version=2)
    class OrderPlaced(BaseModel):
        order_id: UUID

    add(session, OrderPlaced(order_id=order.id), key=f"order-{order.id}")

The arguments are those of `SchemaRegistry.event`.
"""


def validator_of(schema: Any) -> Validator:
    """Create the validator of a schema.

    Raises:
        ConfigError: it is no schema, or its library isn't installed.
    """
    if isinstance(schema, Mapping):
        return _load(_JSON_SCHEMA, schema)
    if hasattr(schema, "__pydantic_validator__"):
        return _load(_PYDANTIC, schema)
    if hasattr(schema, "__struct_fields__") or hasattr(schema, "__attrs_attrs__"):
        return _load(_MSGSPEC, schema)
    if not isinstance(schema, type) and get_origin(schema) is None:
        raise ConfigError(
            f"schema {shorten(schema)}: is neither a JSON Schema (a dict) nor a type; "
            "pass a pydantic model, a msgspec struct, a dataclass or a dict"
        )
    # Payloads are encoded as Pydantic encodes them.
    try:
        return _load(_PYDANTIC, schema)
    except ConfigError as error:
        if error.__cause__ is None:
            raise  # pydantic can read it, and not as it is written
        refusal = error
    try:
        return _load(_MSGSPEC, schema)
    except ConfigError:
        raise refusal from None


def _load(kind: tuple[str, str, str], schema: Any) -> Validator:
    module, name, library = kind
    try:
        found = importlib.import_module(f"pillarbox.outbox.payload.validators.{module}")
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        raise ConfigError(
            f"schema {shorten(schema)}: needs {library}: "
            f"pip install 'pillarbox[{library}]'"
        ) from error
    validator: Validator = getattr(found, name)(schema)
    return validator
