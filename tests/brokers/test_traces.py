"""One trace leads from an HTTP request through any broker to its handlers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import aiohttp
import pytest
from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import SpanKind
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pillarbox import Consumer, Message, add
from pillarbox.inbox.events import MessageHandled
from pillarbox.inbox.webhook import WebhookApp
from pillarbox.outbox.testing.events import RecordedEvents
from pillarbox.outbox.testing.lifetime import free_port
from pillarbox.outbox.testing.samples import TRACEPARENT
from pillarbox.relay.events import BatchSettled
from pillarbox.relay.publisher import Publisher
from pillarbox.relay.publishers.http import HttpPublisher
from tests.fixtures.adapters import ADAPTERS, Adapters, adapters_of
from tests.fixtures.consumers import async_sessions_of
from tests.fixtures.consumers import running as consumer_running
from tests.fixtures.http import SECRET, SECRET_ENV
from tests.fixtures.relay import insert
from tests.fixtures.relay import running as relay_running
from tests.fixtures.spans import Spans, attributes_of, context_of, parent_of
from tests.fixtures.webhook import OPTIONS, served

Handle = Callable[[AsyncSession, Message], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way through a broker, from a publisher to handlers of two topics.

    Attributes:
        receiving: runs the handler during the block, and yields its events.
        system: the broker's name in the semantic conventions.
    """

    publisher: Callable[[], Publisher]
    receiving: Callable[
        [async_sessionmaker[AsyncSession], Handle],
        AbstractAsyncContextManager[RecordedEvents],
    ]
    placed: str
    billed: str
    system: str
    receives_as: str


def way(broker: Adapters) -> Way:
    """Return a way to a `Consumer`."""
    topics = broker.topics
    # The consumer's groups and durables outlive the test.
    name = f"billing-{uuid4().hex}"

    @asynccontextmanager
    async def receiving(
        sessions: async_sessionmaker[AsyncSession], handle: Handle
    ) -> AsyncIterator[RecordedEvents]:
        consumer = Consumer(broker.source(name), sessions, name=name)
        for topic in topics:
            consumer.handles(topic)(handle)
        async with consumer_running(consumer) as events:
            yield events

    placed, billed = topics
    return Way(
        publisher=broker.publisher,
        receiving=receiving,
        placed=placed,
        billed=billed,
        system=broker.system,
        receives_as=broker.receives_as,
    )


@pytest.fixture
def webhook(monkeypatch: pytest.MonkeyPatch) -> Way:
    monkeypatch.setenv(SECRET_ENV, SECRET)
    port = free_port()

    @asynccontextmanager
    async def receiving(
        sessions: async_sessionmaker[AsyncSession], handle: Handle
    ) -> AsyncIterator[RecordedEvents]:
        events = RecordedEvents()
        app = WebhookApp(
            handle, sessions, name="billing", secrets=[SECRET], observers=[events]
        )
        # Starts outside of any span, as a separate server does.
        token = attach(Context())
        async with served(app, port):
            detach(token)
            yield events

    return Way(
        publisher=lambda: HttpPublisher.from_url(f"http://127.0.0.1:{port}/{OPTIONS}"),
        receiving=receiving,
        placed="placed",
        billed="billed",
        system="http",
        receives_as="http",
    )


@pytest.fixture
def over(request: pytest.FixtureRequest) -> Way:
    if request.param == "http":
        receiver: Way = request.getfixturevalue("webhook")
        return receiver
    return way(adapters_of(request.param, request))


def orders_app(
    sessions: async_sessionmaker[AsyncSession], topic: str, spans: Spans
) -> Starlette:
    """Return an application whose web framework makes a span for each request."""

    async def place(request: Request) -> Response:
        with spans.tracer.start_as_current_span("POST /orders", kind=SpanKind.SERVER):
            async with sessions.begin() as session:
                add(session, Message(topic, {"order": 1}, key="order-1"))
        return Response(status_code=201)

    return Starlette(routes=[Route("/orders", place, methods=["POST"])])


@pytest.mark.parametrize("over", [*ADAPTERS, "http"], indirect=True)
async def test_one_trace_leads_from_a_request_to_the_last_handler(
    over: Way, database_url: str, spans: Spans
) -> None:
    handled: list[Message] = []

    async def handle(session: AsyncSession, message: Message) -> None:
        with spans.tracer.start_as_current_span(f"work on {message.topic}"):
            handled.append(message)
            if message.topic == over.placed:
                add(session, Message(over.billed, {"invoice": 1}))

    async with (
        async_sessions_of(database_url) as sessions,
        served(orders_app(sessions, over.placed, spans)) as url,
        aiohttp.ClientSession() as client,
    ):
        # The span that is current when the processes start belongs to no trace.
        with spans.tracer.start_as_current_span("start"):
            async with (
                over.receiving(sessions, handle) as consuming,
                relay_running(database_url, over.publisher()) as relaying,
            ):
                async with client.post(f"{url}/orders") as answer:
                    assert answer.status == 201
                await consuming.wait_for(MessageHandled, 2)
                await relaying.events.wait_for(BatchSettled, 2)

    request = spans.one("POST /orders")
    placed = {
        name: spans.one(f"{name} {over.placed}")
        for name in ("create", "send", "process", "work on")
    }
    billed = {
        name: spans.one(f"{name} {over.billed}")
        for name in ("create", "send", "process", "work on")
    }
    family = [request, *placed.values(), *billed.values()]
    assert len({context_of(span).trace_id for span in family}) == 1
    assert len(spans.all()) == len(family) + 1, [span.name for span in spans.all()]

    def id_of(span: Any) -> int:
        return context_of(span).span_id

    assert parent_of(placed["create"]) == id_of(request)
    assert parent_of(placed["send"]) == id_of(placed["create"])
    assert parent_of(placed["process"]) == id_of(placed["create"])
    assert parent_of(placed["work on"]) == id_of(placed["process"])
    assert parent_of(billed["create"]) == id_of(placed["work on"])
    assert parent_of(billed["send"]) == id_of(billed["create"])
    assert parent_of(billed["process"]) == id_of(billed["create"])
    for sent, message in zip((placed, billed), handled, strict=True):
        about = {name: attributes_of(sent[name]) for name in sent}
        assert {a.get("messaging.message.id") for a in about.values()} == {
            str(message.id),
            None,  # the application's own span
        }
        assert about["create"]["messaging.system"] == "pillarbox"
        assert about["send"]["messaging.system"] == over.system
        assert about["process"]["messaging.system"] == over.receives_as


# The suites show that every broker transports the headers.
@pytest.mark.parametrize("over", ["memory", "http"], indirect=True)
async def test_a_context_survives_unchanged_without_tracing(
    over: Way, database_url: str
) -> None:
    arrived: list[Message] = []

    async def handle(session: AsyncSession, message: Message) -> None:
        arrived.append(message)

    carried = {"traceparent": TRACEPARENT, "tracestate": "vendor=a:b,other=1"}
    async with (
        async_sessions_of(database_url) as sessions,
        over.receiving(sessions, handle) as consuming,
        relay_running(database_url, over.publisher()),
    ):
        await asyncio.to_thread(
            insert, database_url, Message(over.placed, b"1", headers=carried)
        )
        (event,) = await consuming.wait_for(MessageHandled)
    (message,) = arrived
    assert message.headers == carried
    assert event.traceparent == TRACEPARENT
