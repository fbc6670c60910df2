"""The contract between the schema registry and a validation library."""

from typing import Any, Protocol


class PayloadError(Exception):
    """A payload isn't what its schema asks for.

    Args:
        problem: where and what, without the values: it goes into logs.
    """


class Validator(Protocol):
    """Reads payloads of one shape. Safe to share between threads."""

    def load(self, payload: bytes) -> Any:
        """Read JSON as what the schema describes.

        Raises:
            PayloadError: it isn't that, or isn't JSON.
        """
