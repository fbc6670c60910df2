"""JSON Schema, validated by `jsonschema`."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.validators import validator_for

from pillarbox.outbox.errors import CodecError, ConfigError
from pillarbox.outbox.payload import json_codec as codec
from pillarbox.outbox.payload.schema_registry import PayloadError


class JsonSchemaValidator:
    """A JSON Schema; draft 2020-12 unless its `$schema` names another.

    Formats (`"format": "email"`) are annotations, as that draft specifies.

    Raises:
        ConfigError: the schema itself is invalid.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        own = deepcopy(dict(schema))
        kind = validator_for(own, default=Draft202012Validator)
        try:
            kind.check_schema(own)
        except SchemaError as error:
            raise ConfigError(
                f"schema at {error.json_path}: {error.message}; see the JSON Schema "
                "specification"
            ) from error
        self._validator = kind(own)
        self._schema = own

    def json_schema(self) -> Mapping[str, Any]:
        """Return the schema as it was given."""
        return self._schema

    def load(self, payload: bytes) -> Any:
        """Decode JSON and check it; return it unchanged."""
        try:
            value = codec.decode(payload)
        except CodecError as error:
            raise PayloadError(error.problem) from error
        # The library's own message quotes the value, and its JSON path the keys of it.
        wrong = next(self._validator.iter_errors(value), None)
        if wrong is not None:
            rule = "/".join(map(str, wrong.absolute_schema_path))
            raise PayloadError(f"breaks {rule}: {wrong.validator_value!r:.200}")
        return value

    check = load
