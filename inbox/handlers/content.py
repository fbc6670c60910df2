"""Whether a payload is what its content type says.

If it isn't, no handler can read it and no retry mends it. What a content type says
nothing checkable about is let through, and so is what another encoding lies over.
"""

import re
from typing import Final

from inbox.errors import DeadLetter
from outbox import json_codec as codec
from outbox.errors import CodecError, shorten
from outbox.message import Message

_CHARSET: Final = re.compile(
    r"text/.*;\s*charset=\"?([\w.:-]+)", re.ASCII | re.IGNORECASE
)


def check_content(message: Message) -> None:
    """Refuse JSON that is none, and text that isn't in its own charset.

    Raises:
        DeadLetter: it says which, and where.
    """
    kind = message.content_type
    if kind == codec.BINARY:
        return
    problem: Exception | None = None
    try:
        if codec.is_json(kind):
            codec.decode(message.payload)
        elif said := _CHARSET.match(kind):
            message.payload.decode(said[1])
    except (CodecError, UnicodeError) as error:
        problem = error
    except LookupError:
        return  # a charset that we don't know
    if problem is not None and not _is_encoded(message):
        reason = problem.problem if isinstance(problem, CodecError) else str(problem)
        raise DeadLetter(
            f"the payload isn't what its content type {shorten(kind)} says: {reason}"
        ) from problem


def _is_encoded(message: Message) -> bool:
    return any(
        name.lower() == "content-encoding" and value.lower() != "identity"
        for name, value in message.headers.items()
    )
