"""Webhooks that GitHub sent, read from a file with one per line."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pillarbox import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """One event as GitHub sent it."""

    event: str
    action: str | None
    repository: str | None
    owner: str | None
    sender: str
    payload: bytes

    @property
    def message(self) -> Message:
        return Message(
            topic=f"github.{self.event}",
            payload=self.payload,
            key=self.repository or self.owner,
            content_type="application/json",
        )


def read(path: Path) -> Sequence[Webhook]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [webhook_of(json.loads(line)) for line in lines]


def webhook_of(record: dict[str, Any]) -> Webhook:
    payload = record["payload"]
    sender = payload.get("sender") if isinstance(payload, dict) else None
    body = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    return Webhook(
        event=record["event"],
        action=record["action"],
        repository=record["repository"],
        owner=record["owner"],
        sender=sender["login"] if sender else "nobody",
        payload=body.encode(),
    )
