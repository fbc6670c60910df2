"""A message's own headers as one JSON object, where they can't be headers each."""

import json
from collections.abc import Iterable

from pillarbox.outbox.errors import InvalidMessageError


def read_json_headers(value: str | None) -> dict[str, str]:
    """Read a message's own headers; None is no headers.

    Raises:
        InvalidMessageError: the value isn't a JSON object of strings.
    """
    if value is None:
        return {}
    try:
        own = json.loads(value)
    except (ValueError, RecursionError):
        own = None
    if (
        not isinstance(own, dict)
        or not all(isinstance(v, str) for v in own.values())
        or not are_text((*own, *own.values()))
    ):
        raise InvalidMessageError.received(
            "headers", value, "isn't a JSON object of strings"
        )
    return own


def are_text(values: Iterable[str]) -> bool:
    """Return whether texts are free of surrogates, which JSON allows, but not UTF-8."""
    try:
        "".join(values).encode()
    except UnicodeEncodeError:
        return False
    return True
