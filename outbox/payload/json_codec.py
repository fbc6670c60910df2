"""Encode Python objects as a payload's bytes, and decode them.

Uses the standard library's `json`: compact, in UTF-8, without NaN, which RFC 8259
lacks. `jsonable` turns other objects into what it can encode.
"""

import json
import re
from typing import Any, Final

from pillarbox.outbox.errors import CodecError
from pillarbox.outbox.payload.jsonable import jsonable, plain

JSON: Final = "application/json"
BINARY: Final = "application/octet-stream"
_ANY_JSON: Final = re.compile(
    r"application/(?:[\w.+-]+\+)?json\s*(?:;.*)?", re.ASCII | re.IGNORECASE
)

_encoder = json.JSONEncoder(
    ensure_ascii=False,
    allow_nan=False,
    separators=(",", ":"),
    check_circular=True,
    default=jsonable,
)


def encode(value: object) -> bytes:
    """Encode `value` as JSON; `jsonable` describes how it encodes other types.

    Raises:
        CodecError: it contains an object that can't be encoded, a number that isn't
            finite, a circular reference, or text with lone surrogates. The text names
            the path to it.
    """
    try:
        return _encoder.encode(value).encode()
    except CodecError:
        raise
    except (TypeError, ValueError, RecursionError):
        pass  # keys that aren't text, or something that can't be encoded
    try:
        return _encoder.encode(plain(value)).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise CodecError(
            "payload",
            type(value),
            f"can't be encoded as JSON ({error})",
            "register how with @jsonable.register, or pass bytes that you encoded"
            " yourself, with content_type=…",
        ) from error


def decode(payload: bytes) -> Any:
    """Decode JSON.

    Raises:
        CodecError: the bytes aren't JSON in UTF-8.
    """
    try:
        return json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise CodecError(
            "payload",
            type(payload),
            f"isn't JSON ({error})",
            "read message.payload and decode it by its content_type",
        ) from error


def is_json(content_type: str) -> bool:
    """Return whether a media type is JSON or is built on it (`application/x+json`)."""
    return content_type == JSON or _ANY_JSON.fullmatch(content_type) is not None
