"""msgspec: structs, dataclasses, TypedDicts and other annotated types."""

from typing import Any

import msgspec

from outbox.errors import ConfigError
from outbox.schema_registry import PayloadError


class MsgspecValidator:
    """A type that msgspec can decode.

    Raises:
        ConfigError: msgspec can't decode the type.
    """

    def __init__(self, type_: Any) -> None:
        try:
            self._decoder = msgspec.json.Decoder(type_)
        except TypeError as error:
            raise ConfigError(
                f"schema {type_!r}: {error}; annotate its fields with types that JSON "
                "can represent"
            ) from error

    def load(self, payload: bytes) -> Any:
        """Read JSON as an instance of the type."""
        try:
            return self._decoder.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise PayloadError(str(error)) from error
