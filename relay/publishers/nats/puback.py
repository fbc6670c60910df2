"""What JetStream answers to a batch: gathered, and told apart."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from nats.aio.msg import Msg

from outbox.errors import BrokerUnavailableError, shorten
from outbox.message import Message
from relay.publisher import Acked, Nacked

_ACKED: Final = Acked()
_NO_RESPONDERS: Final = "503"
_STREAM: Final = b'{"stream":"'
_SERVER_ERROR: Final = 500
_ACCOUNT_FULL: Final = 10002
_LIMIT_REACHED: Final = 10077
_ALL_MESSAGES: Final = "maximum messages exceeded"
_BYTES: Final = "maximum bytes"
_TOO_LARGE: Final = 10054
_OTHER_STREAM: Final = 10060


@dataclass(frozen=True, slots=True)
class Full:
    """The stream takes nothing like it now; the message is not to blame.

    Attributes:
        entirely: it takes nothing at all, whatever it is.
        size: of the payload, if something smaller could pass.
    """

    stream: str
    reason: str
    entirely: bool = True
    size: int | None = None
    at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Unheard:
    """Nobody listens to the subject now."""


Answer: TypeAlias = Acked | Nacked | Full | Unheard


class Flight:
    """A batch on its way, and what came back of it. For one event loop.

    Attributes:
        answers: one for each message, as they come.
        left: how many are still to come.
        done: done when all are there, or with the error that ended the flight.
    """

    def __init__(self, batch: Sequence[Message]) -> None:
        self.batch = batch
        self.answers: list[Answer | None] = [None] * len(batch)
        self.left = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def answer(self, index: int, answer: Answer) -> None:
        """Keep the answer to one message that was sent."""
        self.answers[index] = answer
        self.left -= 1
        if not self.left and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: BrokerUnavailableError) -> None:
        """End it: no more answers will come."""
        if not self.done.done():
            self.done.set_exception(error)

    def close(self) -> None:
        """Wait no more."""
        if not self.done.cancel() and not self.done.cancelled():
            self.done.exception()


def read_answer(reply: Msg, message: Message) -> tuple[Answer, str]:
    """Give the answer to a message, and the stream that gave it, if one did."""
    data = reply.data
    # JSON writes a key in one way only, so an ack takes no parser.
    if b'"error":' not in data and b'"seq":' in data and data.startswith(_STREAM):
        return _ACKED, data[len(_STREAM) : data.index(b'"', len(_STREAM))].decode()
    if (reply.headers or {}).get("Status") == _NO_RESPONDERS:
        return Unheard(), ""
    try:
        answer: dict[str, Any] = json.loads(data)
        error = answer["error"]
        stream = str(answer.get("stream", ""))
        said = error.get("description", error)
        code, number = int(error.get("code", 0)), error.get("err_code")
    except (ValueError, KeyError, TypeError, AttributeError):
        return Nacked(f"not JetStream but {shorten(data)} answered"), ""
    if number == _TOO_LARGE:
        return Nacked(f"stream {stream!r}: {said} (max_msg_size)", permanent=True), ""
    if number == _OTHER_STREAM:
        return Nacked(
            f"topic {shorten(message.topic)} is captured by another stream than the "
            "URL's; mend stream= or the subjects of the streams"
        ), ""
    if code >= _SERVER_ERROR or number == _ACCOUNT_FULL:
        reason = f"stream {stream!r} takes nothing now: {said}"
        if number != _LIMIT_REACHED or _ALL_MESSAGES in str(said):
            return Full(stream, reason), stream
        size = len(message.payload) if _BYTES in str(said) else None
        return Full(stream, reason, entirely=False, size=size), stream
    return Nacked(f"stream {stream!r} refused it: {said}"), stream


def is_duplicate(reply: Msg) -> bool:
    """Tell whether a stream acked what it had already, which takes no room."""
    return b'"duplicate":' in reply.data
