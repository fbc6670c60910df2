"""msgspec: structs, dataclasses, TypedDicts and other annotated types."""

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.payload.schema_registry import PayloadError

_WITHOUT_VALUES: Final = re.compile(
    "Expected |Object missing |Invalid (RFC3339|UUID|base64)|JSON is |Input data "
)


class MsgspecValidator:
    """A type that msgspec can decode.

    Raises:
        ConfigError: msgspec can't decode the type.
    """

    def __init__(self, type_: Any) -> None:
        self._type = type_
        try:
            self._decoder = msgspec.json.Decoder(type_)
        except TypeError as error:
            raise ConfigError(
                f"schema {type_!r}: {error}; annotate its fields with types that JSON "
                "can represent"
            ) from error

    def json_schema(self) -> Mapping[str, Any]:
        """Return the JSON Schema of the type."""
        return msgspec.json.schema(self._type)

    def load(self, payload: bytes) -> Any:
        """Read JSON as an instance of the type."""
        try:
            return self._decoder.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise PayloadError(_problem(error)) from None

    check = load


def _problem(error: Exception) -> str:
    text, _, where = str(error).partition(" - at ")
    if error.__cause__ is not None or not _WITHOUT_VALUES.match(text):
        text = "breaks a rule"  # the text may be the application's, or quote a value
    return f"{text} - at {where}" if where else text
