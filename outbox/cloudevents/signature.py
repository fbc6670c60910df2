"""Signatures of Standard Webhooks: HMAC-SHA256 over id, timestamp and body."""

import hmac
from base64 import b64decode, b64encode
from typing import Final

from typing_extensions import override

from pillarbox.outbox.errors import ConfigError

ID: Final = "webhook-id"
TIMESTAMP: Final = "webhook-timestamp"
SIGNATURE: Final = "webhook-signature"
VERSION: Final = "v1"

_PREFIX: Final = "whsec_"
_MIN_BYTES: Final = 24
_MAX_BYTES: Final = 64
_HOW_TO_MAKE_ONE: Final = (
    "write whsec_ and the base64 of 24 to 64 random bytes; make one with "
    'echo "whsec_$(openssl rand -base64 32)"'
)


class Secret:
    """A secret that the sender and the receiver of webhooks share. Never printed.

    Args:
        text: `whsec_` and the base64 of 24 to 64 bytes.

    Raises:
        ConfigError: the text is invalid; the message doesn't show it.
    """

    __slots__ = ("_key",)

    def __init__(self, text: str) -> None:
        try:
            key = b64decode(text.removeprefix(_PREFIX), validate=True)
        except ValueError:
            key = b""
        if not text.startswith(_PREFIX) or not _MIN_BYTES <= len(key) <= _MAX_BYTES:
            raise ConfigError(f"webhook secret: is invalid; {_HOW_TO_MAKE_ONE}")
        self._key = key

    def sign(self, id: str, timestamp: int, body: bytes) -> str:
        """Return the signature, with its version: `v1,…`."""
        signed = b"%b.%d.%b" % (id.encode(), timestamp, body)
        mac = hmac.digest(self._key, signed, "sha256")
        return f"{VERSION},{b64encode(mac).decode()}"

    @override
    def __repr__(self) -> str:
        """Hide the secret."""
        return "Secret(…)"


def read_secrets(text: str) -> tuple[Secret, ...]:
    """Read secrets that are separated by white space, the newest first.

    Raises:
        ConfigError: there is no secret, or one is invalid.
    """
    secrets = tuple(map(Secret, text.split()))
    if not secrets:
        raise ConfigError(f"webhook secret: is empty; {_HOW_TO_MAKE_ONE}")
    return secrets
