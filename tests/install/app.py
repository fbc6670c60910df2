"""An application of installed packages only: `pillarbox consume app:consumer`.

`app:hook` receives webhooks instead. `APP_SESSIONS` names its sessions: `plain`, or the
driver of async ones. `APP_SCHEMA` names the library that describes its payloads.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session, sessionmaker

from pillarbox import REGISTRY, Consumer, Message
from pillarbox.inbox.webhook import WebhookApp
from pillarbox.outbox.postgres.connection import sqlalchemy_url

TOPIC = "demo.orders"
EFFECT = text("INSERT INTO effect VALUES (:n)")
URL = sqlalchemy_url(os.environ["PILLARBOX_DATABASE_URL"])
KIND = os.environ["APP_SESSIONS"]
IS_TRACED = "otel" in os.environ["APP_EXTRAS"].split()


@dataclass
class Order:
    """The payload of an order."""

    n: int


def schema(library: str) -> Any:
    """Return a schema of an order, made with a library."""
    match library:
        case "jsonschema":
            return {"type": "object", "properties": {"n": {"type": "integer"}}}
        case "msgspec":
            import msgspec

            return msgspec.defstruct("Order", [("n", int)])
        case "pydantic":
            import pydantic

            return pydantic.create_model("Order", n=(int, ...))
    return Order


if "APP_SCHEMA" in os.environ:
    REGISTRY.register(TOPIC, schema(os.environ["APP_SCHEMA"]))


if IS_TRACED:
    from pillarbox.outbox.observability.opentelemetry import instrument

    instrument()


def traced() -> AbstractContextManager[object]:
    """Run the block in a trace, if tracing is installed."""
    if not IS_TRACED:
        return nullcontext()
    from opentelemetry import trace

    upstream = trace.SpanContext(1, 2, is_remote=True, trace_flags=trace.TraceFlags(1))
    return trace.use_span(trace.NonRecordingSpan(upstream))


def check_trace(message: Message) -> None:
    """Fail if a message lost the trace in which it was added."""
    if IS_TRACED and f"{1:032x}" not in message.headers.get("traceparent", ""):
        raise ValueError(f"headers {dict(message.headers)}")


def handle(session: Session, message: Message) -> None:
    """Store the number of an order."""
    check_trace(message)
    session.execute(EFFECT, message.json())


async def handle_async(session: Any, message: Message) -> None:
    """Store the number of an order in an `AsyncSession`."""
    check_trace(message)
    await session.execute(EFFECT, message.json())


sessions: Any
handler: Any
if KIND == "plain":
    sessions, handler = sessionmaker(create_engine(URL)), handle
else:
    from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

    engine = create_async_engine(URL.replace("psycopg", KIND, 1))
    sessions, handler = async_sessionmaker(engine), handle_async

if "SHOP_SECRET" in os.environ:
    secret = os.environ["SHOP_SECRET"]
    hook = WebhookApp({TOPIC: handler}, sessions, name="billing", secrets=[secret])
else:
    broker = os.environ["PILLARBOX_BROKER_URL"]
    consumer = Consumer(broker, sessions, name="billing")
    consumer.handles(TOPIC)(handler)
