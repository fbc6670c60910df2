"""The schema registry: the schemas of payloads by topic and version.

`add` rejects a message of a registered topic if its payload doesn't match the schema; a
consumer never calls a handler with such a payload.
"""

import importlib
from collections.abc import Mapping
from typing import Any, Final, Protocol, get_origin

from outbox import json_codec as codec
from outbox.errors import ConfigError, InvalidMessageError, shorten
from outbox.message import Message

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


class SchemaRegistry:
    """Schemas by topic and version. Register at import, then share between threads."""

    def __init__(self) -> None:
        self._topics: dict[str, dict[int, Validator]] = {}

    def register(self, topic: str, schema: Any, *, version: int = 1) -> None:
        """Register the schema of a topic's payloads in one version.

        Args:
            topic: the exact topic.
            schema: a JSON Schema as a dict (by jsonschema), a pydantic model, a
                msgspec struct, or a dataclass, TypedDict or other annotated type (by
                msgspec or pydantic, whichever is installed).
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
            raise ConfigError(
                f"topic {shorten(topic)}: has a schema for version {version} already; "
                "register the new one under a new version"
            )
        versions[version] = _validator(schema)

    def check(self, message: Message) -> None:
        """Check a message that is to be added; topics without schemas pass.

        Raises:
            InvalidMessageError: its version isn't registered, or the payload doesn't
                match its schema.
        """
        versions = self._topics.get(message.topic)
        if versions is None:
            return
        if message.schema_version not in versions:
            raise InvalidMessageError(
                "schema_version",
                message.schema_version,
                f"isn't registered for topic {message.topic!r}",
                f"pass one of {', '.join(map(str, sorted(versions)))}, or register it",
            )
        self.load(message)

    def knows(self, message: Message) -> bool:
        """Return whether there is a schema for the message's topic and version."""
        return message.schema_version in self._topics.get(message.topic, {})

    def load(self, message: Message) -> Any:
        """Decode a payload into what its schema describes: a model, a struct, a dict.

        Without a schema, decode it as JSON.

        Raises:
            InvalidMessageError: the payload doesn't match the schema, or isn't JSON.
        """
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
            return validator.load(message.payload)
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


def _validator(schema: Any) -> Validator:
    if isinstance(schema, Mapping):
        return _load(_JSON_SCHEMA, schema)
    if hasattr(schema, "model_validate_json"):
        return _load(_PYDANTIC, schema)
    if hasattr(schema, "__struct_fields__"):
        return _load(_MSGSPEC, schema)
    if not isinstance(schema, type) and get_origin(schema) is None:
        raise ConfigError(
            f"schema {shorten(schema)}: is neither a JSON Schema (a dict) nor a type; "
            "pass a pydantic model, a msgspec struct, a dataclass or a dict"
        )
    try:
        return _load(_MSGSPEC, schema)
    except _MissingLibraryError:
        pass
    try:
        return _load(_PYDANTIC, schema)
    except _MissingLibraryError:
        raise ConfigError(
            f"schema {shorten(schema)}: to check it one of msgspec and pydantic is "
            "needed: pip install 'pillarbox[msgspec]'"
        ) from None


class _MissingLibraryError(ConfigError):
    pass


def _load(kind: tuple[str, str, str], schema: Any) -> Validator:
    module, name, library = kind
    try:
        found = importlib.import_module(f"outbox.validators.{module}")
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        raise _MissingLibraryError(
            f"schema {shorten(schema)}: needs {library}: "
            f"pip install 'pillarbox[{library}]'"
        ) from error
    validator: Validator = getattr(found, name)(schema)
    return validator
