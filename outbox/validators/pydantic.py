"""pydantic: models, dataclasses, TypedDicts and other annotated types."""

from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from outbox.errors import ConfigError
from outbox.schema_registry import PayloadError


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
                "that pydantic knows"
            ) from error

    def load(self, payload: bytes) -> Any:
        """Read JSON as an instance of the type."""
        try:
            return self._adapter.validate_json(payload)
        except ValidationError as error:
            first, *others = error.errors(
                include_input=False, include_url=False, include_context=False
            )
            where = ".".join(("$", *map(str, first["loc"])))
            more = f" (and {len(others)} more)" if others else ""
            raise PayloadError(f"at {where}: {first['msg']}{more}") from None
