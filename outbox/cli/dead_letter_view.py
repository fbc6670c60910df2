"""Dead letters as people read them: a list, and all of one."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from outbox.cli.table import draw_table, printable
from outbox.dead_letters.letter import Letter, Summary, decode_json
from outbox.duration import write_duration

_MAX_REASON: Final = 80
_COLUMNS: Final = (
    "id",
    "age",
    "status",
    "topic",
    "key",
    "origin",
    "attempts",
    "retries",
    "reason",
)


def table_of(found: Sequence[Summary]) -> str:
    """Draw a list."""
    if not found:
        return "no dead letters\n"
    now = datetime.now(UTC)
    return draw_table(
        _COLUMNS,
        [
            (
                letter.id,
                write_duration(now - letter.created_at),
                letter.status,
                letter.topic,
                letter.key,
                letter.origin,
                letter.attempts,
                letter.retry_count,
                letter.error_reason[:_MAX_REASON],
            )
            for letter in found
        ],
    )


def page_of(letter: Letter) -> str:
    """Write down all of one."""
    said = letter.as_json()
    trace = said.pop("error_stacktrace")
    for name in ("headers", "payload_json", "payload_base64"):
        said.pop(name, None)
    lines = [
        f"{name:<17} {printable(value)}"
        for name, value in said.items()
        if value is not None
    ]
    lines += ["", "headers"]
    headers = (
        letter.headers if isinstance(letter.headers, dict) else {"": letter.headers}
    )
    lines += [
        f"  {printable(name)}: {printable(value)}" for name, value in headers.items()
    ]
    lines += ["", f"payload ({len(letter.payload)} bytes)", _payload(letter)]
    if trace is not None:
        lines += ["", "stack trace", trace]
    return printable("\n".join(lines), lines=True) + "\n"


def _payload(letter: Letter) -> str:
    payload = bytes(letter.payload)
    decoded = decode_json(letter.content_type, payload)
    if decoded is not None:
        return json.dumps(decoded[0], indent=2, ensure_ascii=False)
    return payload.decode(errors="backslashreplace")
