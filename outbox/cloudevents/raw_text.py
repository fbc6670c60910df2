"""Lossless conversion of bytes from other producers to text.

A dead letter's metadata is text. Bytes that aren't UTF-8 become a `data:` URL in base64
(RFC 2397), from which they can be recovered.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Final

MAX_REASON: Final = 4096
"""The most characters of a stored reason: with 4 bytes each, they are 16 KiB."""
_BASE64: Final = "data:;base64,"


def text_of(data: bytes) -> str:
    """Decode bytes as UTF-8, or write them as a `data:` URL.

    Different bytes give different texts, and no text contains a NUL, which PostgreSQL
    rejects.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        pass
    else:
        if "\0" not in text and not text.startswith(_BASE64):
            return text
    return _BASE64 + b64encode(data).decode()


def bytes_of(text: str) -> bytes:
    """Return the bytes that `text_of` was given."""
    if text.startswith(_BASE64):
        return b64decode(text.removeprefix(_BASE64))
    return text.encode()


def payload_of(fields: Mapping[bytes, bytes]) -> bytes:
    """Encode all fields as one JSON object, for an entry without a payload."""
    texts = {text_of(name): text_of(value) for name, value in fields.items()}
    return json.dumps(texts, ensure_ascii=False).encode()


def storable(text: str) -> str:
    r"""Escape what PostgreSQL can't store in text: NUL and lone surrogates.

    They become `\0` and, for example, `\ud800`.
    """
    return text.replace("\0", "\\0").encode(errors="backslashreplace").decode()


def storable_reason(text: str) -> str:
    """Make a text storable, and so short that every table takes it as a reason."""
    return storable(text)[:MAX_REASON]
