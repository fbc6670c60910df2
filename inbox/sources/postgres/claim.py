"""Read a row of `inbox.delivery`, whatever someone may have put there by hand."""

import json
from collections.abc import Sequence
from typing import Any

from inbox.sources.postgres.lanes import ClaimedDelivery
from outbox.message import Message


def read_delivery(row: Sequence[Any]) -> ClaimedDelivery:
    """Make a delivery of a row of the statement `claim_deliveries`."""
    (
        lane,
        seq,
        created_at,
        message_id,
        attempts,
        topic,
        key,
        tenant,
        payload,
        content_type,
        text,
        schema_version,
        _,
    ) = row
    headers, problem = ({}, None) if text is None else _read_headers(text)
    if schema_version < 1:
        problem = f"schema_version is {schema_version}, it starts at 1"
    message = Message(
        topic,
        payload,
        key=key,
        tenant=tenant,
        headers=headers,
        id=message_id,
        content_type=content_type,
        schema_version=schema_version,
    )
    return ClaimedDelivery(lane, seq, created_at, attempts, message, problem)


def _read_headers(text: str) -> tuple[dict[str, str], str | None]:
    try:
        headers = json.loads(text)
    except RecursionError:
        headers = None
    if isinstance(headers, dict) and all(isinstance(v, str) for v in headers.values()):
        return headers, None
    return {"headers": text}, "headers is not a JSON object of strings"
