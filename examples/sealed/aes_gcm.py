"""Payloads encrypted with AES-GCM, each bound to the id of its message.

    codec = AesGcm.from_environment()

    add(session, message, codec=codec)                      # application
    Consumer(source, sessions, name="billing", codec=codec)        # consumer
    pillarbox relay --codec app:codec                                    # or the relay

PILLARBOX_KEYS holds the keys, newest first, in the form `id:base64,id:base64`. Deploy a
new key to every process that decodes, then to the application. Remove an old key when
no message encrypted with it is left in tables, broker or dead letters.
"""

import base64
import os
from collections.abc import Mapping
from typing import Self

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from pillarbox import Message
from pillarbox.outbox.errors import ConfigError

_NONCE = 12


class AesGcm:
    """The codec: encodes with the first key, decodes with any.

    Args:
        strict: whether to refuse payloads that aren't encrypted.
    """

    name = "aes-gcm"

    def __init__(self, keys: Mapping[str, bytes], *, strict: bool = False) -> None:
        if not keys:
            raise ConfigError(
                "keys={}: empty; pass at least one, {'2026-11': 32 bytes}"
            )
        for key_id, key in keys.items():
            if len(key) not in {16, 24, 32}:
                raise ConfigError(
                    f"key {key_id!r}: has {len(key)} bytes; make one of 32 by"
                    " AESGCM.generate_key(256)"
                )
        self.strict = strict
        self._current = next(iter(keys))
        self._ciphers = {key_id: AESGCM(key) for key_id, key in keys.items()}

    @classmethod
    def from_environment(cls, variable: str = "PILLARBOX_KEYS") -> Self:
        pairs = [pair.partition(":") for pair in os.environ[variable].split(",")]
        return cls({key_id: base64.b64decode(key) for key_id, _, key in pairs})

    def encode(self, message: Message) -> tuple[str, bytes]:
        nonce = os.urandom(_NONCE)
        cipher = self._ciphers[self._current]
        # Bound to the id, so that a payload can't be moved to another message.
        sealed = cipher.encrypt(nonce, message.payload, message.id.bytes)
        return self._current, nonce + sealed

    def decode(self, message: Message, key_id: str) -> bytes:
        nonce, sealed = message.payload[:_NONCE], message.payload[_NONCE:]
        return self._ciphers[key_id].decrypt(nonce, sealed, message.id.bytes)
