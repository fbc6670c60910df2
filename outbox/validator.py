"""The contract between the schema registry and a validation library."""

from typing import Any, Protocol


class PayloadError(Exception):
    """A payload doesn't match its schema.

    Args:
        problem: where and what, without the values: it goes into logs.
    """


class Validator(Protocol):
    """Validates and reads payloads of one schema. Safe to share between threads."""

    def load(self, payload: bytes) -> Any:
        """Read JSON as an instance of the schema.

        Raises:
            PayloadError: it isn't that, or isn't JSON.
        """
