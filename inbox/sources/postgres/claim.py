"""Read a row of `inbox.delivery`, whatever someone may have put there by hand."""

import json
from collections.abc import Sequence
from typing import Any

from inbox.sources.postgres.lanes import Claimed
from outbox.message import Message


def read_delivery(row: Sequence[Any]) -> Claimed:
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
        headers,
        schema_version,
        _,
    ) = row
    problem = None
    if headers is None:
        headers = {}
    elif not isinstance(headers, dict) or not all(
        isinstance(value, str) for value in headers.values()
    ):
        headers = {"headers": json.dumps(headers, ensure_ascii=False)}
        problem = "headers is not a JSON object of strings"
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
    return Claimed(lane, seq, created_at, attempts, message, problem)
