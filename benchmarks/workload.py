"""The messages that every relay drains: the same payloads and keys for all.

It uses only the standard library, since peers import it in their own environments.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

TOPIC = "orders.placed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """How many messages there are, how large each is, and how many keys they share."""

    messages: int
    payload_bytes: int = 300
    keys: int = 1_000

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        """Yield the key and payload of each message, with the keys in rotation."""
        for number in range(self.messages):
            yield f"order-{number % self.keys}", payload(number, self.payload_bytes)


def payload(number: int, size: int) -> bytes:
    """Return a JSON object of exactly `size` bytes, different for each number."""
    bare = json.dumps({"order_id": number, "note": ""}, separators=(",", ":"))
    filler = "x" * (size - len(bare))
    body = json.dumps({"order_id": number, "note": filler}, separators=(",", ":"))
    encoded = body.encode()
    if len(encoded) != size:
        raise ValueError(f"payload_bytes is {size}; it must be at least {len(bare)}")
    return encoded
