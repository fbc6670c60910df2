"""pydantic: models, dataclasses, TypedDicts and other annotated types."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from outbox.errors import ConfigError
from outbox.payload.schema_registry import PayloadError


class PydanticValidator:
    """A type that pydantic can validate.

    Raises:
        ConfigError: pydantic can't validate the type.
    """

    def __init__(self, type_: Any) -> None:
        try:
            self._adapter = TypeAdapter(type_)
        except PydanticUserError as error:
            raise ConfigError(
                f"schema {type_!r}: {error.message}; annotate its fields with types "
                "that pydantic supports"
            ) from error

    def json_schema(self) -> Mapping[str, Any]:
        """Return the JSON Schema of the type."""
        return self._adapter.json_schema()

    def load(self, payload: bytes) -> Any:
        """Read JSON as an instance of the type."""
        try:
            return self._adapter.validate_json(payload)
        except ValidationError as error:
            first, *others = error.errors(
                include_input=False, include_url=False, include_context=False
            )
            names: set[object] = set()  # any others are keys of the payload
            with suppress(PydanticUserError):  # not all types have a JSON Schema
                names = _names_in(self._adapter.json_schema())
            path = (p if p in names or type(p) is int else "…" for p in first["loc"])
            where = ".".join(("$", *map(str, path)))
            more = f" (and {len(others)} more)" if others else ""
            raise PayloadError(f"at {where}: {first['type']}{more}") from None


def _names_in(schema: object) -> set[object]:
    """Return the names of all fields of a JSON Schema."""
    if isinstance(schema, list):
        return set[object]().union(*map(_names_in, schema))
    if not isinstance(schema, dict):
        return set()
    fields = schema.get("properties")
    names = set(fields) if isinstance(fields, dict) else set()
    return names.union(*map(_names_in, schema.values()))
