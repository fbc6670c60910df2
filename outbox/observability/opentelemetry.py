"""OpenTelemetry traces, from `add` to the handler; needs the extra `otel`.

    create orders.placed             add(…), in the caller's trace
    ├── send orders.placed           the relay; a batch is linked to its traces
    ├── retry, dead_letter, …        any other outcome
    └── process orders.placed        the handler
        └── create orders.billed     what it adds

`instrument()` turns tracing on in a process, and so does running any command under
`opentelemetry-instrument`. Names and attributes follow OpenTelemetry's semantic
conventions for messaging. This module needs only OpenTelemetry's API; without an SDK,
nothing is recorded.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from functools import wraps
from importlib.metadata import version
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

try:
    from opentelemetry import context as otel_context
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.trace import (
        Link,
        Span,
        SpanContext,
        SpanKind,
        Status,
        StatusCode,
        TraceFlags,
        TracerProvider,
    )
    from opentelemetry.trace.propagation.tracecontext import (
        TraceContextTextMapPropagator,
    )
    from opentelemetry.util.types import AttributeValue
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{__name__}: {error}; pip install 'pillarbox[otel]'",
        name=error.name,
    ) from error

from pillarbox.outbox import tracing
from pillarbox.outbox.errors import one_line
from pillarbox.outbox.events import TracingFailed
from pillarbox.outbox.message import Message
from pillarbox.outbox.observability.logging import LogEvents
from pillarbox.outbox.tracing import CAUSE, TRACEPARENT, TRACESTATE, Traced

Describe: TypeAlias = Callable[[Message], Mapping[str, AttributeValue]]

_OWN_SYSTEM: Final = "pillarbox"
_POSTPONE: Final = "postpone"  # requested by the handler
_SAMPLED: Final = frozenset("13579bdf")
_CONVERSATION: Final = "correlation-id"
# The number of links per span that the SDK keeps by default.
_MAX_LINKS: Final = 128
_VERSION_0: Final = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_TRACE_CONTEXT: Final = TraceContextTextMapPropagator()

_system: Final[ContextVar[str]] = ContextVar("pillarbox_system", default=_OWN_SYSTEM)
_processing: Final[ContextVar["_Processing | None"]] = ContextVar(
    "pillarbox_processing", default=None
)


def instrument(
    *,
    tracer_provider: TracerProvider | None = None,
    attributes: Describe | None = None,
) -> "Tracing":
    """Trace every message that this process adds, publishes or handles from now on.

    Call it once, when the process starts. A second call replaces the first one's
    settings. It sets `pillarbox.outbox.tracing.tracer`, and also returns it.

    Args:
        tracer_provider: by default, the one that OpenTelemetry's SDK is set up with,
            even if it is set up later.
        attributes: returns more attributes for a message's spans. By default, spans
            contain neither its key nor its tenant. They never contain its payload.
    """
    tracing.tracer = made = Tracing(tracer_provider, attributes)
    return made


def uninstrument() -> None:
    """Stop tracing messages."""
    tracing.tracer = None


class Instrumentor:
    """The hooks that `opentelemetry-instrument` calls in every process it starts."""

    def instrument(self, **options: Any) -> None:
        """Call `instrument`."""
        instrument(tracer_provider=options.get("tracer_provider"))

    def uninstrument(self, **_: Any) -> None:
        """Call `uninstrument`."""
        uninstrument()


def _safely(method: Callable[..., None]) -> Callable[..., None]:
    """Let a method report its failure instead: no trace may cost a message."""

    @wraps(method)
    def call(self: Any, *arguments: Any) -> None:
        try:
            method(self, *arguments)
        except Exception as error:  # noqa: BLE001 (of the SDK or the application)
            self.tracing.fail(error)

    return call


class Tracing:
    """The `pillarbox.outbox.tracing.Tracer` that `instrument` creates."""

    def __init__(
        self, tracer_provider: TracerProvider | None, attributes: Describe | None
    ) -> None:
        self.tracing = self  # for `_safely`
        self._tracer = trace.get_tracer(
            "pillarbox", version("pillarbox"), tracer_provider
        )
        self._describe = attributes
        self._log = LogEvents()

    def create(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Return the messages, each with the context of its own span.

        A message that has a `traceparent` is left unchanged, and gets no span.
        """
        try:
            return tuple(map(self._create, messages))
        except Exception as error:  # noqa: BLE001 (no trace may cost a message)
            self.fail(error)
            return messages

    def _create(self, message: Message) -> Message:
        if TRACEPARENT in message.headers:
            return message
        headers = dict(message.headers)
        span = self.start(
            "create", "create", SpanKind.PRODUCER, [message], system=_OWN_SYSTEM
        )
        _TRACE_CONTEXT.inject(headers, trace.set_span_in_context(span))
        span.end()
        if TRACEPARENT not in headers:
            # Without an SDK, the caller may still have a context.
            _TRACE_CONTEXT.inject(headers)
        if TRACEPARENT not in headers:
            return message
        return message.replace(headers=headers)

    def send(self, messages: Sequence[Message], system: str) -> "_Sending":
        """Trace the publishing of a batch."""
        return _Sending(self, messages, system)

    def process(
        self,
        messages: Sequence[Traced],
        consumer: str,
        *,
        system: str | None = None,
        is_decision: Callable[[Exception], bool] = lambda _: False,
    ) -> "_Processing":
        """Trace the handling of messages."""
        return _Processing(self, messages, consumer, system, is_decision)

    @_safely
    def receive(self, system: str) -> None:
        """Record the broker, and detach from the span that started the consumer."""
        _system.set(system)
        otel_context.attach(Context())

    @_safely
    def observe(self, event: Any) -> None:
        """Create the span of an event that settles a message."""
        operation: str | None = event.settles
        if operation is None:
            return
        headers = {} if event.traceparent is None else {TRACEPARENT: event.traceparent}
        about = tracing.Received(event.id, event.topic, headers)
        origin = context_of(about)
        more: dict[str, AttributeValue] = {}
        if (consumer := getattr(event, "consumer", None)) is not None:
            more["messaging.consumer.group.name"] = consumer
        if (attempts := getattr(event, "attempts", None)) is not None:
            more["pillarbox.attempts"] = attempts
        if (delay := getattr(event, "seconds_until_retry", None)) is not None:
            more["pillarbox.retry_delay"] = delay
        span = self.start(
            operation,
            "settle",
            SpanKind.CLIENT,
            [about],
            context=None if origin is None else parent_of(origin),
            links=[] if origin is None else [Link(origin)],
            attributes=more,
        )
        if operation != _POSTPONE:
            span.set_status(Status(StatusCode.ERROR, event.reason))
        span.end()

    def start(
        self,
        operation: str,
        kind_of_operation: str,
        kind: SpanKind,
        messages: Sequence[Traced],
        *,
        system: str | None = None,
        context: Context | None = None,
        links: Sequence[Link] = (),
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> Span:
        """Start a span, named as the conventions prescribe."""
        topics = {message.topic for message in messages}
        topic = topics.pop() if len(topics) == 1 else None
        values: dict[str, AttributeValue] = {
            "messaging.system": system or _system.get(),
            "messaging.operation.name": operation,
            "messaging.operation.type": kind_of_operation,
        }
        if topic:
            values["messaging.destination.name"] = topic
        if len(messages) == 1:
            values |= self._about(messages[0])
        else:
            values["messaging.batch.message_count"] = len(messages)
        return self._tracer.start_span(
            f"{operation} {topic}" if topic else operation,
            context,
            kind,
            values if attributes is None else {**values, **attributes},
            links,
        )

    def _about(self, message: Traced) -> dict[str, AttributeValue]:
        values: dict[str, AttributeValue] = {"messaging.message.id": str(message.id)}
        headers = message.headers
        if headers:
            if _CONVERSATION in headers:
                values["messaging.message.conversation_id"] = headers[_CONVERSATION]
            if CAUSE in headers:
                values["pillarbox.causation_id"] = headers[CAUSE]
        if self._describe is not None and isinstance(message, Message):
            values |= self._describe(message)
        return values

    def fail(self, error: Exception) -> None:
        """Log that tracing failed; this has no other effect."""
        self._log(TracingFailed(reason=one_line(error)))


class _Sending:
    """The spans of one publisher call; none has more links than a span can hold.

    The context of the first span is current. A single message's span is in its trace.
    """

    def __init__(
        self, tracing: Tracing, messages: Sequence[Message], system: str
    ) -> None:
        self._messages = messages
        self.tracing = tracing
        self._system = system
        self._spans: list[Span] = []
        self._token: Any = None

    def __enter__(self) -> Self:
        self._start()
        return self

    @_safely
    def _start(self) -> None:
        messages = self._messages
        links = sum(map(_is_sampled, messages))
        size = len(messages) if links <= _MAX_LINKS else _MAX_LINKS
        for start in range(0, len(messages), size):
            self._spans.append(self._start_one(messages[start : start + size]))
        current = trace.set_span_in_context(self._spans[0])
        self._token = otel_context.attach(current)

    def _start_one(self, messages: Sequence[Message]) -> Span:
        origin = context_of(messages[0]) if len(messages) == 1 else None
        # The relay sends tens of thousands of messages a second, so the rest of a
        # context is read only if the message is sampled.
        origins = map(context_of, filter(_is_sampled, messages))
        return self.tracing.start(
            "send",
            "send",
            SpanKind.CLIENT,
            messages,
            system=self._system,
            context=None if origin is None else parent_of(origin),
            links=[Link(origin) for origin in origins if origin is not None],
        )

    @_safely
    def refused(self, reasons: Sequence[str]) -> None:
        """Record how many messages the broker refused; each gets its own span."""
        for span in self._spans:
            span.set_attribute("pillarbox.refused", len(reasons))
            if len(self._messages) == 1:
                fail(span, "refused", reasons[0])

    @_safely
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        if self._token is not None:
            otel_context.detach(self._token)
        for span in self._spans:
            if isinstance(error, Exception):
                fail(span, name_of(error), one_line(error))
            span.end()


class _Processing:
    """The span of one call of a handler."""

    def __init__(
        self,
        tracing: Tracing,
        messages: Sequence[Traced],
        consumer: str,
        system: str | None,
        is_decision: Callable[[Exception], bool],
    ) -> None:
        self.tracing = tracing
        self._messages = messages
        self._consumer = consumer
        self._system = system
        self._is_decision = is_decision
        self._outcome = "handled"
        self._span: Span | None = None
        self._outer: _Processing | None = None
        self._exits = ExitStack()

    def __enter__(self) -> Self:
        self._start()
        return self

    @_safely
    def _start(self) -> None:
        outer = _processing.get()
        if (
            outer is not None
            and self._consumer == outer._consumer
            and self._ids() <= outer._ids()
        ):
            self._outer = outer
            return
        ambient = trace.get_current_span().get_span_context()
        messages = self._messages
        if len(messages) > 1:
            messages = [message for message in messages if _is_sampled(message)]
        origins = map(context_of, messages)
        known = [origin for origin in origins if origin is not None]
        parent = None  # the current context
        if len(self._messages) == 1 and known and not ambient.is_valid:
            parent = parent_of(known[0], otel_context.get_current())
        self._span = span = self.tracing.start(
            "process",
            "process",
            SpanKind.CONSUMER,
            self._messages,
            system=self._system,
            context=parent,
            links=[Link(origin) for origin in known],
            attributes={"messaging.consumer.group.name": self._consumer},
        )
        self._exits.callback(self._end, span)
        self._exits.callback(_processing.reset, _processing.set(self))
        token = otel_context.attach(trace.set_span_in_context(span))
        self._exits.callback(otel_context.detach, token)

    def _ids(self) -> frozenset[str]:
        return frozenset(str(message.id) for message in self._messages)

    def skipped(self) -> None:
        """Record that the messages were duplicates."""
        self._outcome = "duplicate"
        if self._outer is not None:
            self._outer.skipped()

    @_safely
    def failed(self, error: BaseException) -> None:
        """Record what the handler raised."""
        if self._span is None:
            return
        if isinstance(error, Exception) and self._is_decision(error):
            self._outcome = "retry"
        elif isinstance(error, Exception):
            self._outcome = "failed"
            # The error's text can quote the payload; the event of the retry reports a
            # reason.
            fail(self._span, name_of(error))
        else:
            self._outcome = "cancelled"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        if error is not None:
            self.failed(error)
        self._close()

    @_safely
    def _close(self) -> None:
        self._exits.close()

    def _end(self, span: Span) -> None:
        span.set_attribute("pillarbox.outcome", self._outcome)
        span.end()


def context_of(message: Traced) -> SpanContext | None:
    """Read the context in which a message was added; None if there is none."""
    parent = message.headers.get(TRACEPARENT)
    if parent is None:
        return None
    if _VERSION_0.fullmatch(parent) is None or TRACESTATE in message.headers:
        found = _TRACE_CONTEXT.extract(message.headers, Context())
        origin = trace.get_current_span(found).get_span_context()
    else:
        # Does what the propagator does, in a fifth of the time.
        origin = SpanContext(
            int(parent[3:35], 16),
            int(parent[36:52], 16),
            is_remote=True,
            trace_flags=TraceFlags(int(parent[53:], 16)),
        )
    return origin if origin.is_valid else None


def parent_of(origin: SpanContext, context: Context | None = None) -> Context:
    """Return a context whose spans are children of a message's span."""
    return trace.set_span_in_context(
        trace.NonRecordingSpan(origin), Context() if context is None else context
    )


def fail(span: Span, kind: str, reason: str | None = None) -> None:
    """Mark a span as failed."""
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, reason))


def name_of(error: BaseException) -> str:
    """Return the name of an error's class, as in `error.type`."""
    kind = type(error)
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_sampled(message: Traced) -> bool:
    return message.headers.get(TRACEPARENT, "")[-1:] in _SAMPLED
