"""Write a dead letter: the message, and a description of the failure.

While a message has a PENDING dead letter, its consumer writes no second one. So a
consumer that dies before the ack leaves no duplicate.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any, Final, TypeAlias
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.orm import Session

from pillarbox.inbox.connection import connection_of
from pillarbox.inbox.errors import (
    DeadLetter,
    InvalidReceiptError,
    TransactionEndedError,
)
from pillarbox.inbox.handlers.executor import Executor
from pillarbox.inbox.handlers.terms import call_alone
from pillarbox.inbox.idle import limit_idle_now
from pillarbox.outbox.bounded_dict import BoundedDict
from pillarbox.outbox.cloudevents.raw_text import storable
from pillarbox.outbox.dead_letters.letter import MAX_SHORT, SHORTENED
from pillarbox.outbox.errors import one_line, traceback_of
from pillarbox.outbox.limits import MAX_INDEXED_BYTES, MAX_SCHEMA_VERSION
from pillarbox.outbox.message import Message
from pillarbox.outbox.payload import json_codec as codec
from pillarbox.outbox.payload.payload_codec import CODEC_HEADER
from pillarbox.outbox.postgres.sql_files import load

Redact: TypeAlias = Callable[[str], str]
"""Returns a reason or a stack trace without its confidential parts."""

MAX_STACKTRACE_CHARS: Final = 16 * 1024
_MAX_REASON_CHARS: Final = 2 * 1024
_MAX_INTEGER: Final = 2**31 - 1
# A string in jsonb can hold up to 256 MiB.
_MAX_SPARE_CHARS: Final = 64 * 1024 * 1024
_CUT: Final = "\n…\n"

# Any role that can connect can hold this lock, so the wait has a limit.
_LOCK: Final = text(
    "SELECT pg_advisory_xact_lock(:lock)"
    " FROM (SELECT count(set_config('lock_timeout', '5s', true)) AS changed) AS limited"
    " WHERE changed > 0"
)


@dataclass(frozen=True, slots=True)
class StoredFailure:
    """The stored failure; `is_new`: the message had no dead letter yet.

    Attributes:
        reported: the stack trace for logs, which can lack the texts of errors.
    """

    reason: str
    stacktrace: str | None
    is_new: bool = True
    reported: str | None = None


Failure: TypeAlias = str | BaseException | StoredFailure


class Stacktraces:
    """Selects the stack traces to report: only that of each message's first failure.

    So a log has one line for each attempt, but the stack trace only once.
    """

    def __init__(self) -> None:
        self._reported: BoundedDict[UUID, bool] = BoundedDict()

    def first(
        self, message: Message, failure: Failure, described: StoredFailure
    ) -> str | None:
        """Return the stack trace, unless one was returned before or it says nothing."""
        if isinstance(failure, DeadLetter) and failure.__cause__ is None:
            return None  # a decision, not a failure
        if isinstance(failure, InvalidReceiptError) or described.reported is None:
            return None
        if self._reported.get(message.id):
            return None
        self._reported[message.id] = True
        return described.reported


class DeadLetterWriter:
    """Writes the dead letters of one consumer.

    Args:
        redact: applied to all text about an error, which is then stored and reported.
            If it raises, only the type of the error that it raised is stored. Without
            it, only the dead letter's stack trace has the texts of the application's
            errors, for it is read with the rights to the payload.
    """

    def __init__(
        self,
        consumer: str,
        executor: Executor,
        redact: Redact | None = None,
    ) -> None:
        self.consumer = consumer
        self._executor = executor
        self._redact = redact

    async def write(
        self,
        message: Message,
        *,
        attempts: int,
        failure: Failure,
        readable: bool = True,
        refusal: str | None = None,
    ) -> StoredFailure:
        """Write a dead letter in its own transaction.

        After a `TransactionEndedError`, the schedule doesn't retry it: a retry would
        find the committed receipt and mark the dead letter SUCCEEDED.

        Args:
            readable: False if the delivery couldn't be read as a message with an id.
                Then a digest of its content identifies it, and it can be inspected but
                not retried.
            refusal: why the row was refused. Then everything but the payload is stored
                as JSON in one header, and the digest identifies the message.
        """
        described = self.describe(failure, message.headers)
        if len(message.topic.encode(errors="surrogatepass")) > MAX_INDEXED_BYTES:
            refusal = refusal or "its topic is too long for the index"
        if refusal is not None:
            refused = (
                " (stored in a spare row, because PostgreSQL refused the row:"
                f" {refusal})"
            )
            reason = described.reason[: _MAX_REASON_CHARS - len(refused)] + refused
            described = replace(described, reason=reason)
        is_whole = readable and refusal is None
        values = {
            "origin": f"consumer:{self.consumer}",
            "message_id": str(message.id) if is_whole else _digest(message),
            "attempts": min(attempts, _MAX_INTEGER),
            "payload": message.payload,
            "error_reason": described.reason,
            "error_stacktrace": described.stacktrace,
            "is_scheduled": not isinstance(failure, TransactionEndedError),
            "priority": str(message.priority),
            **(_columns(message) if refusal is None else _spare_columns(message)),
        }
        is_new = await self._executor.transact(partial(insert_dead_letter, values))
        return replace(described, is_new=is_new)

    def describe(self, failure: Failure, headers: object) -> StoredFailure:
        """Describe a failure in text that is redacted, shortened and storable.

        Args:
            headers: the message's. If its payload is encoded, nothing is stored in
                clear.
        """
        if isinstance(failure, StoredFailure):
            if self._redact is None or failure.reported is not None:
                return failure
            return replace(failure, reported=failure.stacktrace)
        stored = reported = None
        if isinstance(failure, BaseException):
            is_safe = self._redact is not None
            reason = one_line(failure, with_text=is_safe)
            is_encoded = isinstance(headers, Mapping) and CODEC_HEADER in headers
            stored = traceback_of(failure, with_text=is_safe or not is_encoded)
            stored = self._redacted(stored)
            reported = stored if is_safe else traceback_of(failure)
        else:
            reason = failure
        return StoredFailure(
            _storable(self._redacted(reason)[:_MAX_REASON_CHARS]) or "",
            _bounded(_storable(stored)),
            reported=_bounded(_storable(reported)),
        )

    def _redacted(self, text: str) -> str:
        if self._redact is None:
            return text
        try:
            return str(call_alone(self._redact, text))
        except Exception as error:  # noqa: BLE001 (what it should hide stays hidden)
            return f"omitted: redact raised {type(error).__name__}"


def insert_dead_letter(values: dict[str, Any], session: Session) -> bool:
    """Insert a dead letter; return False if the message has a PENDING one.

    Two processes that dead-letter the same message at the same time take the same lock.
    The second one sees what the first one committed only if each statement has its own
    snapshot.
    """
    connection = connection_of(session, isolation_level="READ COMMITTED")
    limit_idle_now(session)
    named = json.dumps([values["origin"], values["message_id"]])
    lock = int.from_bytes(sha256(named.encode()).digest()[:8], signed=True)
    connection.execute(_LOCK, {"lock": lock})
    written = connection.execute(text(load("inbox", "insert_dead_letter")), values)
    return written.first() is not None


def _columns(message: Message) -> dict[str, Any]:
    headers = {
        _storable(name): _storable(value) for name, value in message.headers.items()
    }
    return {
        "topic": _storable(message.topic) or "",
        "key": _storable(message.key),
        "tenant": _storable(message.tenant),
        "schema_version": min(message.schema_version, MAX_SCHEMA_VERSION),
        "content_type": _storable(message.content_type),
        "headers": json.dumps(headers),
    }


def _spare_columns(message: Message) -> dict[str, Any]:
    topic = ascii(message.topic)[1:-1]
    return {
        "topic": topic if len(topic) <= MAX_SHORT else topic[:MAX_SHORT] + SHORTENED,
        "key": None,
        "tenant": None,
        "schema_version": 1,
        "content_type": codec.BINARY,
        # ASCII in JSON in JSON: it can be refused only because of its size.
        "headers": json.dumps(
            {"message": json.dumps(_all_but_payload(message))[:_MAX_SPARE_CHARS]}
        ),
    }


def _all_but_payload(message: Message) -> dict[str, Any]:
    return {
        "id": str(message.id),
        "topic": message.topic,
        "key": message.key,
        "tenant": message.tenant,
        "content_type": message.content_type,
        "schema_version": str(message.schema_version),
        "headers": {str(name): str(value) for name, value in message.headers.items()},
    }


def _digest(message: Message) -> str:
    headers = sorted((str(name), str(value)) for name, value in message.headers.items())
    came = json.dumps([message.topic, message.key, headers])
    digest = sha256(came.encode() + message.payload)
    return f"sha256:{digest.hexdigest()}"


def _bounded(trace: str | None) -> str | None:
    if trace is None or len(trace) <= MAX_STACKTRACE_CHARS:
        return trace
    # The end shows what was raised, the beginning where it came from.
    start = MAX_STACKTRACE_CHARS // 4
    tail = MAX_STACKTRACE_CHARS - start - len(_CUT)
    return f"{trace[:start]}{_CUT}{trace[-tail:]}"


def _storable(value: str | None) -> str | None:
    return None if value is None else storable(value)
