"""A publisher for NATS JetStream: a topic maps to a subject that a stream captures.

A batch is sent in order over one connection; then JetStream's answers, which arrive at
one inbox, are collected. `Nats-Msg-Id` is the message's id, so a message published
twice within the stream's duplicate window is stored once. A full stream can refuse a
message and accept a smaller one that follows.
"""

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any, Final, Self, TypeAlias

from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from pillarbox.outbox.brokers.nats.connection import (
    NatsConnection,
    NatsLink,
    nats_errors,
    publish_command,
)
from pillarbox.outbox.brokers.nats.message import (
    encode_headers,
    header_problem,
)
from pillarbox.outbox.brokers.nats.options import NatsOptions
from pillarbox.outbox.brokers.nats.settings import NatsSettings
from pillarbox.outbox.brokers.shards import Shard
from pillarbox.outbox.errors import BrokerUnavailableError, shorten
from pillarbox.outbox.message import Message
from pillarbox.relay.answers import Answers
from pillarbox.relay.publisher import Acked, Confirmation, Nacked, nack_too_large
from pillarbox.relay.publishers.nats.layouts import Layouts, line_of

_PONG: Final = 5
_RECENTLY: Final = 30.0
_POSTPONED: Final = timedelta(seconds=1)
_NO_ACK: Final = (
    "has no_ack and never confirms a message: turn it off (nats stream edit --ack)"
)
_INTEREST: Final = (
    "confirms and drops messages while it has no consumer: start its consumers first,"
    " or set its retention to limits"
)
_logger = logging.getLogger(__name__)

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
    """The stream is full or unavailable; the message isn't to blame.

    Attributes:
        entirely: whether the stream accepts no message at all.
        size: the size of the payload, if a smaller one might be accepted.
    """

    stream: str
    reason: str
    entirely: bool = True
    size: int | None = None
    at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Unanswered:
    """No stream listens on the subject at the moment."""


Answer: TypeAlias = Acked | Nacked | Full | Unanswered


def read_answer(reply: Msg, message: Message) -> tuple[Answer, str]:
    """Return the answer to a message, and the name of its stream, if known."""
    data = reply.data
    # These keys can be encoded in only one way, so an ack needs no JSON parser.
    if b'"error":' not in data and b'"seq":' in data and data.startswith(_STREAM):
        return _ACKED, data[len(_STREAM) : data.index(b'"', len(_STREAM))].decode()
    if (reply.headers or {}).get("Status") == _NO_RESPONDERS:
        return Unanswered(), ""
    try:
        answer: dict[str, Any] = json.loads(data)
        error = answer["error"]
        stream = str(answer.get("stream", ""))
        description = error.get("description", error)
        code, number = int(error.get("code", 0)), error.get("err_code")
    except (ValueError, KeyError, TypeError, AttributeError):
        return Nacked(f"unexpected answer, not from JetStream: {shorten(data)}"), ""
    if number == _TOO_LARGE:
        return Nacked(
            f"stream {stream!r}: {description} (max_msg_size)", permanent=True
        ), ""
    if number == _OTHER_STREAM:
        return Nacked(
            f"topic {shorten(message.topic)} is captured by another stream than the "
            "URL's; correct stream= or the subjects of the streams"
        ), ""
    if code >= _SERVER_ERROR or number == _ACCOUNT_FULL:
        reason = f"stream {stream!r} is not accepting messages: {description}"
        if number != _LIMIT_REACHED or _ALL_MESSAGES in str(description):
            return Full(stream, reason), stream
        size = len(message.payload) if _BYTES in str(description) else None
        return Full(stream, reason, entirely=False, size=size), stream
    return Nacked(f"stream {stream!r} refused it: {description}"), stream


def is_duplicate(reply: Msg) -> bool:
    """Return whether the stream already had the message, which then takes no space."""
    return b'"duplicate":' in reply.data


class NatsPublisher:
    """Publishes to the streams that capture the topics, or to the one named in the URL.

    Args:
        url: `nats://` or `tls://`, with the options of `NatsOptions`.

    A message that exceeds the server's limit, including its headers, is nacked as
    permanent.

    Raises:
        ConfigError: the URL can't be used.
    """

    def __init__(self, url: str) -> None:
        self._settings = NatsSettings.from_url(url)
        self.identity = NatsOptions.identity(url)
        options = self._settings.options
        self._stream = options.stream
        self._shards = options.shards
        self._max_payload_bytes = options.max_payload_bytes
        self._timeout = options.timeout.total_seconds()
        self._link = NatsLink(
            settings=self._settings,
            owner="publisher",
            prepare=self._prepare,
            on_lost=self._lost,
            on_refusal=self._forbidden,
        )
        self._inbox = ""
        self._layouts: Layouts | None = None
        self._tickets = count()
        self._flights: dict[str, tuple[Answers[Answer], int]] = {}
        self._acked: dict[str, tuple[float, int]] = {}
        self._silent: dict[str, tuple[float, Nacked]] = {}

    async def __aenter__(self) -> Self:
        """Connect; warn of streams that lose messages.

        Raises:
            BrokerUnavailableError: NATS is unreachable, or rejects the connection.
            ConfigError: JetStream or the stream named in the URL is missing.
        """
        connection = await self._link.open()
        try:
            streams = await connection.streams()
        except BaseException:
            await self.__aexit__()
            raise
        for info in streams:
            config, name = info["config"], self._settings.name
            if config.get("no_ack"):
                _logger.warning("%s: stream %r %s", name, config["name"], _NO_ACK)
            elif (
                config["retention"] == "interest"
                and not (info["state"]["consumer_count"])
            ):
                _logger.warning("%s: stream %r %s", name, config["name"], _INTEREST)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Disconnect."""
        await self._link.close()

    async def check(self) -> None:
        """Send PING to NATS.

        Raises:
            BrokerUnavailableError: NATS doesn't respond.
        """
        connection = await self._connected()
        try:
            await connection.client.flush(timeout=_PONG)
        except (NatsError, OSError, TimeoutError) as error:
            raise await connection.drop(error) from error

    async def publish(self, batch: Sequence[Message]) -> Sequence[Confirmation]:
        """Send the batch in order, and wait for JetStream's answers.

        Raises:
            BrokerUnavailableError: the connection broke, answers are missing, or
                nothing at all is accepted at the moment. The next call reconnects.
        """
        if not batch:
            return []
        connection = await self._connected()
        assert self._layouts is not None
        with nats_errors(self._settings):
            refused = await self._layouts.refused({line_of(it) for it in batch})
        headers = [
            refused.get(line_of(message)) or self._headers(message, connection)
            for message in batch
        ]
        answers: Answers[Answer] = Answers(
            batch, (each if isinstance(each, Nacked) else None for each in headers)
        )
        if refused:
            answers.hold_back()
        if answers.left:
            await self._send(answers, headers, connection)
        return await self._confirmations_of(answers, connection)

    def _headers(self, message: Message, connection: NatsConnection) -> bytes | Nacked:
        if problem := header_problem(message):
            return Nacked(problem, permanent=True)
        if too_large := nack_too_large(message.payload, self._max_payload_bytes):
            return too_large
        known_at, silent = self._silent.get(message.topic, (0.0, None))
        if silent is not None and known_at > time.monotonic() - _RECENTLY:
            return silent
        headers = encode_headers(message, self._stream)
        size = len(message.payload) + len(headers)
        limit = connection.client.max_payload
        if size > limit:
            return Nacked(
                f"message has {size} bytes with its headers, the server's limit is "
                f"{limit} (max_payload)",
                permanent=True,
            )
        return headers

    async def _send(
        self,
        answers: Answers[Answer],
        headers: Sequence[bytes | Nacked],
        connection: NatsConnection,
    ) -> None:
        tickets, commands = [], []
        answers.expect(answers.left)
        for index, (message, own) in enumerate(
            zip(answers.batch, headers, strict=True)
        ):
            if isinstance(own, Nacked) or answers.given[index] is not None:
                continue
            ticket = str(next(self._tickets))
            tickets.append(ticket)
            self._flights[ticket] = answers, index
            reply = self._inbox + ticket
            subject = self._subject(message)
            commands.append(publish_command(subject, reply, own, message.payload))
        try:
            await connection.client.publish_all(commands)
            await self._wait(answers, connection)
        except (NatsError, OSError, TimeoutError) as error:
            reason = connection.lost or self._settings.unavailable(error)
            await connection.drop(reason)
            raise reason from error
        finally:
            for ticket in tickets:
                self._flights.pop(ticket, None)

    async def _wait(self, answers: Answers[Answer], connection: NatsConnection) -> None:
        """Wait until all is answered, or nothing more is although NATS responds."""
        left = -1
        while len(answers.missing) != left:
            left = len(answers.missing)
            await asyncio.wait({answers.done}, timeout=self._timeout)
            if answers.done.done():
                answers.done.result()
                return
        try:
            await connection.client.flush(timeout=_PONG)
        except (NatsError, OSError, TimeoutError) as error:
            raise TimeoutError(
                f"no answer for {self._timeout:g} s to {left} of {len(answers.batch)} "
                "messages"
            ) from error

    async def _on_reply(self, reply: Msg) -> None:
        waiting = self._flights.pop(reply.subject[len(self._inbox) :], None)
        if waiting is None:
            return
        answers, index = waiting
        answer, stream = read_answer(reply, answers.batch[index])
        if isinstance(answer, Acked) and not is_duplicate(reply):
            size = len(answers.batch[index].payload)
            self._acked[stream] = time.monotonic(), size
        answers.give(index, answer)

    def _forbidden(self, text: str) -> None:
        # NATS doesn't answer forbidden messages; its error names the subject, in lower
        # case.
        for ticket, (answers, index) in list(self._flights.items()):
            if f'"{self._subject(answers.batch[index]).lower()}"' in text:
                del self._flights[ticket]
                answers.give(index, Nacked(f"NATS refused it: {text}"))

    async def _confirmations_of(
        self, answers: Answers[Answer], connection: NatsConnection
    ) -> list[Confirmation]:
        """Turn answers into confirmations, blaming the topic, stream or broker."""
        confirmations: list[Confirmation] = []
        streams: dict[str, Nacked | Full] = {}
        is_some_stored = any(isinstance(it, Acked) for it in answers.given)
        for message, answer in zip(answers.batch, answers.given, strict=True):
            verdict: Acked | Nacked | Full
            match answer:
                case Unanswered() | None:
                    subject = self._subject(message)
                    if subject not in streams:
                        streams[subject] = await self._silence(
                            subject, connection, is_late=answer is None
                        )
                    verdict = streams[subject]
                case _:
                    verdict = answer
            if isinstance(verdict, Full):
                if self._goes_on(verdict):
                    verdict = Nacked(verdict.reason)
                elif answer is None and is_some_stored:
                    # The broker is available, and acked messages aren't sent again.
                    verdict = Nacked(verdict.reason, retry_after=_POSTPONED)
                else:
                    raise self._settings.unavailable(verdict.reason)
            confirmations.append(verdict)
        return confirmations

    async def _silence(
        self, topic: str, connection: NatsConnection, *, is_late: bool
    ) -> Nacked | Full:
        with nats_errors(self._settings):
            if self._stream is not None and await connection.ready():
                # This affects all messages equally, so this one isn't to blame.
                raise self._settings.unavailable(
                    f"stream {self._stream!r} had been deleted and was recreated"
                )
            answer = await connection.ask("STREAM.NAMES", {"subject": topic})
            if is_late and answer.get("streams"):
                return await self._unconfirmed(topic, answer["streams"][0], connection)
        if streams := answer.get("streams"):
            return Full(streams[0], f"stream {streams[0]!r} has no leader now")
        return Nacked(
            f"no stream captures topic {shorten(topic)}: add it to the subjects of "
            "a stream"
        )

    async def _unconfirmed(
        self, topic: str, stream: str, connection: NatsConnection
    ) -> Nacked | Full:
        (info,) = await connection.streams(stream) or [{"config": {}}]
        if not info["config"].get("no_ack"):
            reason = f"stream {stream!r} gave no answer for {self._timeout:g} s"
            return Full(stream, reason)
        refused = Nacked(f"stream {stream!r} {_NO_ACK}")
        self._silent[Shard.named(topic).topic] = time.monotonic(), refused
        return refused

    def _goes_on(self, full: Full) -> bool:
        """Return whether the broker accepts other messages, and so is available.

        If size is the limit, a message that the same stream accepted since then counts
        only if it was smaller: a larger one shows that the stream has space again.
        """
        if not full.entirely:
            at, size = self._acked.get(full.stream, (0.0, 0))
            if at > full.at and (full.size is None or size < full.size):
                return True
        recently = time.monotonic() - _RECENTLY
        return any(
            name != full.stream and at > recently
            for name, (at, _) in self._acked.items()
        )

    async def _connected(self) -> NatsConnection:
        with nats_errors(self._settings):
            return await self._link.connected()

    def _subject(self, message: Message) -> str:
        if self._shards == 1:
            return message.topic
        return Shard.holding(message, self._shards).name

    async def _prepare(self, connection: NatsConnection) -> None:
        self._layouts = Layouts(connection, self._stream, self._shards)
        self._inbox = f"{connection.client.new_inbox()}."
        await connection.client.subscribe(f"{self._inbox}*", cb=self._on_reply)

    def _lost(self, reason: BrokerUnavailableError) -> None:
        for answers, _ in list(self._flights.values()):
            answers.fail(reason)
