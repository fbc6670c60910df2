"""An ASGI endpoint for webhooks that answers after the handler's effects are committed.

    handled, or a duplicate                 ──▶ 204
    handler raised DeadLetter               ──▶ 204, and a row in inbox.dead_letter
    handler committed the session itself    ──▶ 204, and a row in inbox.dead_letter
    invalid signature                       ──▶ 401
    invalid message, id too old or too new  ──▶ 400
    no handler for the topic                ──▶ 425 with Retry-After; later 404
    handler raised RetryLater(delay)        ──▶ 425 with Retry-After
    handler raised anything else            ──▶ 500
    database unavailable                    ──▶ 503

It runs under any ASGI server, standalone or mounted in Starlette, FastAPI or Litestar.
"""

import asyncio
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Final, TypeAlias

from pillarbox.inbox.consuming.rollout import Rollout
from pillarbox.inbox.dead_letters.write import DeadLetterWriter, Redact, Stacktraces
from pillarbox.inbox.errors import InvalidReceiptError, TransactionEndedError
from pillarbox.inbox.events import DuplicateSkipped, MessageDeadLettered, MessageHandled
from pillarbox.inbox.handlers.arguments import arguments_of
from pillarbox.inbox.handlers.executor import Executor
from pillarbox.inbox.handlers.outcome import Failed, Later, Outage
from pillarbox.inbox.handlers.registration import Registered
from pillarbox.inbox.handlers.routes import Handler, Routes
from pillarbox.inbox.handlers.sessions import (
    DEFAULT_IN_FLIGHT,
    Sessions,
    make_executor,
    pool_limit,
)
from pillarbox.inbox.handlers.signature import Takes
from pillarbox.inbox.handlers.terms import Terms
from pillarbox.inbox.handlers.upcasting import check_content
from pillarbox.inbox.idle import DEFAULT_MAX_IDLE, check_max_idle
from pillarbox.inbox.processing import processing
from pillarbox.inbox.receipt import check_text, has_receipt
from pillarbox.inbox.verdict import Fatal, Lost, Unclear, judge
from pillarbox.inbox.webhook.events import WebhookFailed, WebhookRefused
from pillarbox.inbox.webhook.request import Receive, Refused, Scope, Send, read_request
from pillarbox.inbox.webhook.verifier import InvalidSignatureError, Verifier
from pillarbox.outbox import tracing
from pillarbox.outbox.errors import (
    ConfigError,
    InvalidMessageError,
    one_line,
    shorten,
)
from pillarbox.outbox.events import Observer, Observers
from pillarbox.outbox.message import Message
from pillarbox.outbox.observability.logging import logged
from pillarbox.outbox.payload.payload_codec import why_unreadable

__all__ = ["WebhookApp"]

_SYSTEM: Final = "http"
_LET_RELAY_DECODE: Final = "let the relay decode it, pillarbox relay --codec"

Handlers: TypeAlias = Handler | Mapping[str, Handler]


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    text: str = ""
    headers: tuple[tuple[str, str], ...] = ()


def _routes(handlers: Handlers, chosen: Executor) -> Routes[Registered]:
    routes: Routes[Registered] = Routes()
    given = handlers if isinstance(handlers, Mapping) else {"*": handlers}
    for topic, handler in given.items():
        arguments = arguments_of(handler, Takes.ONE)
        chosen.check(handler, arguments)
        terms = Terms(arguments=arguments)
        routes.add(topic, Registered(handler, Takes.ONE, terms))
    if not routes.topics:
        raise ConfigError("handlers: empty; pass a handler, or {topic: handler}")
    return routes


class WebhookApp:
    """An ASGI application that handles each posted message once.

    A handler `(session, message)` runs in the transaction that holds the receipt, and
    the answer is 2xx only after the transaction commits. A handler must not commit the
    session.

    Args:
        handlers: one handler for all topics, or a mapping from topics (`orders.placed`,
            `orders.*`) to handlers.
        sessions: an `async_sessionmaker` for async handlers, a `sessionmaker` for plain
            functions, which run in threads.
        name: the name of the consumer on the receipts.
        secrets: `whsec_…`, shared with the sender; pass several while you rotate a
            secret.
        tolerance: the maximum difference between the sender's clock and this host's.
        max_payload_bytes: a larger body is refused without being read.
        max_in_flight: the maximum number of handlers that run at once; further requests
            wait. At most the size of the engine's pool. Default: 64, or the pool size
            minus one if that is smaller.
        read_timeout: the maximum time to receive a request's body.
        max_idle: the maximum idle time in a handler's transaction, as for `Consumer`.
        rollout: how long the sender is asked to wait for a replica that has a handler.
        redact: removes confidential parts from reasons and stack traces.
        observers: called with every event, besides the log.

    Raises:
        ConfigError: an argument is invalid.
    """

    def __init__(
        self,
        handlers: Handlers,
        sessions: Sessions,
        *,
        name: str,
        secrets: Iterable[str],
        tolerance: timedelta = timedelta(minutes=5),
        max_payload_bytes: int = 1024 * 1024,
        max_in_flight: int | None = None,
        read_timeout: timedelta = timedelta(seconds=10),
        max_idle: timedelta | None = DEFAULT_MAX_IDLE,
        rollout: timedelta = timedelta(minutes=15),
        redact: Redact | None = None,
        observers: Iterable[Observer] = (),
    ) -> None:
        check_text("consumer", name)
        limit = pool_limit(sessions)
        if max_in_flight is None:
            max_in_flight = DEFAULT_IN_FLIGHT if limit is None else limit.max_in_flight
        elif limit is not None:
            limit.check(max_in_flight, max_in_flight)
        for field, value in (
            ("max_payload_bytes", max_payload_bytes),
            ("max_in_flight", max_in_flight),
            ("read_timeout", read_timeout.total_seconds()),
        ):
            if value <= 0:
                raise ConfigError(f"{field}={value}: must be above 0")
        check_max_idle(max_idle)
        chosen = make_executor(sessions, name, max_in_flight, max_idle)
        self._routes = _routes(handlers, chosen)
        self._rollout = Rollout(rollout)
        self._executor = chosen
        self._dead_letters = DeadLetterWriter(name, chosen, redact)
        self._stacktraces = Stacktraces()
        self._verifier = Verifier(secrets, tolerance=tolerance)
        self._name = name
        self._max_payload_bytes = max_payload_bytes
        self._slots = asyncio.Semaphore(max_in_flight)
        self._read_timeout = read_timeout.total_seconds()
        self._notify = chosen.calls.notify = Observers(logged(observers)).notify

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] == "lifespan":
            await self._run_lifespan(receive, send)
            return
        if scope["type"] != "http":
            raise ConfigError(f"WebhookApp serves HTTP, not {scope['type']}")
        try:
            answer = await self._answer(scope, receive)
        except Refused as refusal:
            reason = str(refusal)
            self._notify(
                WebhookRefused(
                    consumer=self._name, status=refusal.status, reason=reason
                )
            )
            allow = (("allow", "POST"),) if refusal.status == 405 else ()
            answer = _Answer(refusal.status, reason, allow)
        body = answer.text.encode(errors="replace")
        headers = [*answer.headers, ("content-length", str(len(body)))]
        if body:
            headers.append(("content-type", "text/plain; charset=utf-8"))
        if answer.status == 204:
            headers = []
        await send(
            {
                "type": "http.response.start",
                "status": answer.status,
                "headers": [(n.encode(), v.encode()) for n, v in headers],
            }
        )
        await send({"type": "http.response.body", "body": body})

    async def _run_lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            event = (await receive())["type"]
            if event == "lifespan.shutdown":
                await self._executor.close()
                await send({"type": "lifespan.shutdown.complete"})
                return
            try:
                await self._executor.probe()
            except Exception as error:  # noqa: BLE001 (the server reports it)
                text = f"can't read the inbox in the database: {one_line(error)}"
                await send({"type": "lifespan.startup.failed", "message": text})
                return
            await send({"type": "lifespan.startup.complete"})

    async def _answer(self, scope: Scope, receive: Receive) -> _Answer:
        headers, body = await read_request(
            scope,
            receive,
            max_bytes=self._max_payload_bytes,
            max_seconds=self._read_timeout,
        )
        try:
            message = self._verifier.read(headers, body)
        except InvalidSignatureError as error:
            raise Refused(401, str(error)) from error
        except InvalidMessageError as error:
            raise Refused(400, str(error)) from error
        handler = self._routes.find(message.topic)
        if handler is None:
            text = f"no handler for topic {shorten(message.topic)}"
            if (wait := self._rollout.wait(message.topic)) is None:
                raise Refused(404, text)
            seconds = math.ceil(wait.total_seconds())
            return self._fail(message, 425, text, (("retry-after", str(seconds)),))
        async with self._slots:
            return await self._handle(handler, message)

    async def _handle(self, handler: Registered, message: Message) -> _Answer:
        if (encoded := why_unreadable(message, _LET_RELAY_DECODE)) is not None:
            return self._fail(message, 425, encoded, (("retry-after", "60"),))
        started = time.monotonic()
        try:
            check_content(message)
            with processing(tracing.tracer, [message], self._name, system=_SYSTEM):
                is_new = await self._executor.handle(handler, [message])
        except Exception as raised:  # noqa: BLE001 (a handler may raise anything)
            return await self._judge(message, raised)
        if is_new:
            seconds = time.monotonic() - started
            self._notify(MessageHandled.of(self._name, message, seconds=seconds))
        else:
            self._notify(DuplicateSkipped.of(self._name, message))
        return _Answer(204)

    async def _judge(self, message: Message, raised: Exception) -> _Answer:
        match judge(raised):
            case Later(delay, reason):
                seconds = str(max(1, math.ceil(delay.total_seconds())))
                return self._fail(message, 425, reason, (("retry-after", seconds),))
            case Fatal(InvalidReceiptError() as error):
                raise Refused(400, str(error)) from error
            case Fatal(error):
                return await self._dead_letter(message, error)
            case Outage(error):
                return self._fail(message, 503, one_line(error))
            case Unclear(error):
                return await self._report_ended_transaction(message, error)
            case Lost(error):
                return self._fail(message, 503, one_line(error), error=error)
            case Failed(error):
                return self._fail(message, 500, one_line(error), error=error)

    async def _report_ended_transaction(
        self, message: Message, error: TransactionEndedError
    ) -> _Answer:
        try:
            look_up = partial(has_receipt, message.id, self._name)
            was_committed = await self._executor.transact(look_up)
        except Exception as failure:  # noqa: BLE001 (both are reported)
            return self._fail(message, 503, f"{one_line(error)} ({one_line(failure)})")
        if was_committed:
            # A redelivery would be skipped as a duplicate, which would hide the error.
            return await self._dead_letter(message, error)
        return self._fail(message, 500, one_line(error))

    async def _dead_letter(self, message: Message, failure: Exception) -> _Answer:
        try:
            written = await self._dead_letters.write(
                message, attempts=1, failure=failure
            )
        except Exception as error:  # noqa: BLE001 (the sender sends it again)
            return self._fail(message, 503, one_line(error))
        if written.is_new:
            self._notify(
                MessageDeadLettered.of(
                    self._name, message, attempts=1, reason=written.reason
                )
            )
        return _Answer(204)

    def _fail(
        self,
        message: Message,
        status: int,
        reason: str,
        headers: tuple[tuple[str, str], ...] = (),
        *,
        error: Exception | None = None,
    ) -> _Answer:
        failure = reason if error is None else error
        described = self._dead_letters.describe(failure, message.headers)
        self._notify(
            WebhookFailed.of(
                self._name,
                message,
                status=status,
                reason=described.reason,
                stacktrace=self._stacktraces.first(message, failure, described),
            )
        )
        # The reason can be confidential, so the sender doesn't get it.
        return _Answer(status, "temporary failure; send it again", headers)
