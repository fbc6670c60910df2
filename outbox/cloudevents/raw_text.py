"""What others wrote that is no message of ours, as text that loses nothing.

Metadata of a dead letter is text. Bytes that can't be become a `data:` URL in base64,
of RFC 2397, from which whoever looks at the dead letter gets them back.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Final

_BASE64: Final = "data:;base64,"


def text_of(data: bytes) -> str:
    """Give bytes as the text that they are, or as a `data:` URL.

    No two values give the same text, and none has a NUL, which PostgreSQL refuses.
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
    """Give the bytes that `text_of` was given."""
    if text.startswith(_BASE64):
        return b64decode(text.removeprefix(_BASE64))
    return text.encode()


def payload_of(fields: Mapping[bytes, bytes]) -> bytes:
    """Write all fields as one JSON object, where none of them is the payload."""
    texts = {text_of(name): text_of(value) for name, value in fields.items()}
    return json.dumps(texts, ensure_ascii=False).encode()


def storable(text: str) -> str:
    """Escape what PostgreSQL takes in no text: NUL, and a lone surrogate."""
    return text.replace("\0", "\\0").encode(errors="backslashreplace").decode()
