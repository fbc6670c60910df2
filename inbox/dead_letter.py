"""Give a message up: where it goes, and what is kept about the failure."""

import traceback
from typing import Any, Final

from sqlalchemy import bindparam, insert

from inbox.schema import dead_letter_table
from outbox.errors import hide_values, one_line
from outbox.message import Message

MAX_STACKTRACE_CHARS: Final = 16 * 1024
_MAX_REASON_CHARS: Final = 2 * 1024
_CUT: Final = "\n…\n"

INSERT_DEAD_LETTER: Final = (
    insert(dead_letter_table)
    .values(
        {
            name: bindparam(name, type_=dead_letter_table.c[name].type)
            for name in (
                "origin",
                "message_id",
                "topic",
                "key",
                "tenant",
                "attempts",
                "schema_version",
                "content_type",
                "headers",
                "payload",
                "error_reason",
                "error_stacktrace",
            )
        }
    )
    .inline()
)


def dead_letter_values(
    message: Message, *, consumer: str, attempts: int, failure: str | BaseException
) -> dict[str, Any]:
    """Give the values for `INSERT_DEAD_LETTER`, bounded, as text that can be stored."""
    if isinstance(failure, BaseException):
        reason, stacktrace = one_line(failure), _stacktrace(failure)
    else:
        reason, stacktrace = failure, None
    return {
        "origin": f"consumer:{consumer}",
        "message_id": str(message.id),
        "topic": _storable(message.topic),
        "key": _storable(message.key),
        "tenant": _storable(message.tenant),
        "attempts": attempts,
        "schema_version": message.schema_version,
        "content_type": _storable(message.content_type),
        "headers": {
            _storable(name): _storable(value) for name, value in message.headers.items()
        },
        "payload": message.payload,
        "error_reason": _storable(reason[:_MAX_REASON_CHARS]),
        "error_stacktrace": stacktrace,
    }


def _stacktrace(error: BaseException) -> str | None:
    hide_values(error)
    trace = _storable("".join(traceback.format_exception(error)))
    if trace is None or len(trace) <= MAX_STACKTRACE_CHARS:
        return trace
    # The end says what was raised, the beginning how it came there.
    head = MAX_STACKTRACE_CHARS // 4
    tail = MAX_STACKTRACE_CHARS - head - len(_CUT)
    return f"{trace[:head]}{_CUT}{trace[-tail:]}"


def _storable(value: str | None) -> str | None:
    if value is None:
        return None
    return value.replace("\0", "\\0").encode(errors="backslashreplace").decode()
