"""Handlers take sessions, messages and decoded payloads, in any order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import product
from typing import Annotated, Any, TypedDict
from uuid import UUID

import attrs
import msgspec
import psycopg
import pytest
from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import pillarbox.inbox.handlers.arguments as arguments_module
from pillarbox import Message, idempotent, uuid7
from pillarbox.inbox.errors import DeadLetter
from pillarbox.inbox.events import MessageDeadLettered, MessageHandled
from pillarbox.inbox.handlers.arguments import arguments_of
from pillarbox.inbox.handlers.signature import Takes
from pillarbox.inbox.jobs.job import AsyncJob, Job
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.errors import ConfigError
from tests.fixtures.consumers import (
    POOLS,
    consuming,
    is_plain,
    sessions_of,
)
from tests.fixtures.sessions import execute

ID = UUID("01890000-0000-7000-8000-000000000000")
AT = datetime(2026, 1, 31, 12, 30, tzinfo=UTC)


class Model(BaseModel):
    id: UUID
    at: datetime
    amount: Decimal


@dataclass
class Plain:
    id: UUID
    at: datetime
    amount: Decimal


@attrs.define
class Attrs:
    id: UUID
    at: datetime
    amount: Decimal


class Struct(msgspec.Struct):
    id: UUID
    at: datetime
    amount: Decimal


class Typed(TypedDict):
    id: UUID
    at: datetime
    amount: Decimal


class Cat(BaseModel):
    kind: str = "cat"


ORDER: dict[str, Any] = {"id": ID, "at": AT, "amount": Decimal("1.10")}
KINDS: dict[Any, Any] = {
    Model: Model(**ORDER),
    Plain: Plain(**ORDER),
    Attrs: Attrs(**ORDER),
    Struct: Struct(**ORDER),
    Typed: Typed(id=ID, at=AT, amount=Decimal("1.10")),
    list[Model]: [Model(**ORDER)],
    dict[str, datetime]: {"at": AT},
    Model | Cat: Model(**ORDER),
    Annotated[Cat | Model, Field(union_mode="left_to_right")]: Cat(kind="x"),
    dict: {"a": [1]},
    list: [1, "a"],
}


def of(annotation: Any, takes: Takes = Takes.ONE) -> Any:
    """Return the arguments of a handler (session or job, payload)."""

    def handle(first: Any, order: Any) -> None: ...

    handle.__annotations__ = {"first": Any, "order": annotation}
    return arguments_of(handle, takes)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_payload_is_decoded_to_what_was_encoded(kind: Any) -> None:
    value = KINDS[kind]
    message = Message("orders.placed", value)

    assert of(kind).of("session", message) == ("session", value)
    assert of(Sequence[kind], Takes.MANY).of("session", [message] * 2) == (
        *("session", [value] * 2),
    )


def test_bytes_are_the_payload_as_it_is() -> None:
    assert of(bytes).of("session", Message("t", b"\xff")) == ("session", b"\xff")


@pytest.mark.parametrize(
    ("kind", "payload", "problem"),
    [
        (Model, {**ORDER, "amount": "secret"}, r"at \$\.amount: decimal_parsing"),
        (Struct, {**ORDER, "at": "secret"}, r"Invalid RFC3339.* - at `\$\.at`"),
        (Model, {}, r"at \$\.id: missing \(and 2 more\)"),
        (dict, [1], "it isn't a dict"),
        (Model, b'{"secret', "isn't JSON"),
        (
            dict,
            Message("t", b'{"secret', content_type="application/json"),
            "isn't JSON",
        ),
        (
            Model,
            Message("t", b"{", content_type="application/json"),
            r"at \$: json_inv",
        ),
    ],
)
def test_a_payload_that_does_not_fit_is_dead_lettered_without_its_values(
    kind: Any, payload: Any, problem: str
) -> None:
    message = payload if isinstance(payload, Message) else Message("t", payload)
    with pytest.raises(DeadLetter, match=problem) as refused:
        of(kind).of("session", message)
    assert "secret" not in str(refused.value)


def f_any(order: Model, message: Message, session: Session) -> None: ...
def f_job(message: Message, job: Job, order: Model) -> None: ...
def f_half(session, order: Model) -> None: ...  # type: ignore[no-untyped-def]
def f_default(session: Session, order: Model, retries: int = 3) -> None: ...


@pytest.mark.parametrize(
    ("handler", "takes", "given"),
    [
        (f_any, Takes.ONE, ("order", "message", "first")),
        (f_job, Takes.JOB, ("message", "first", "order")),
        (f_half, Takes.ONE, ("first", "order")),
        (f_default, Takes.ONE, ("first", "order")),
    ],
    ids=lambda it: getattr(it, "__name__", None),
)
def test_arguments_can_have_any_order(
    handler: Callable[..., Any], takes: Takes, given: tuple[str, ...]
) -> None:
    message = Message("t", ORDER)
    values = {"order": Model(**ORDER), "message": message, "first": "first"}
    arguments = arguments_of(handler, takes).of("first", message)
    assert arguments == tuple(values[name] for name in given)


def test_annotations_for_type_checkers_alone_are_known_by_name() -> None:
    def handle(
        message: "somewhere.Message",  # type: ignore[name-defined]  # noqa: F821
        session: "orm.Session",  # type: ignore[name-defined]  # noqa: F821
    ) -> None: ...

    assert arguments_of(handle, Takes.ONE).of("session", "message") == (
        *("message", "session"),
    )


def test_a_payload_of_a_local_class_is_refused_when_it_is_registered() -> None:
    def handle(session: Session, order: "Local") -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(
        ConfigError, match="can't resolve the annotation 'Local' of argument 'order'"
    ):
        arguments_of(handle, Takes.ONE)


def test_without_a_library_dicts_and_lists_are_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(schema: Any) -> Any:
        raise ConfigError("pip install")

    monkeypatch.setattr(arguments_module, "validator_of", missing)

    assert of(dict).of(1, Message("t", {"a": 1})) == (1, {"a": 1})
    with pytest.raises(ConfigError, match="pip install"):
        of(Plain)


ENTRIES: dict[str, dict[str, Any]] = {
    "handles": {},
    "handles_batch": {"batch": 2},
    "job": {"lease": timedelta(seconds=30)},
}


def handler_of(entry: str, driver: str, seen: list[Any]) -> Any:
    """Return a handler that takes its payload first."""
    payload: Any = Sequence[Model] if entry == "handles_batch" else Model
    plain = is_plain(driver)
    first: Any = Session if plain else AsyncSession
    if entry == "job":
        first = Job if plain else AsyncJob
    elif driver in POOLS:
        first = psycopg.Connection if plain else psycopg.AsyncConnection

    def handle(order: Any, first: Any) -> None:
        seen.append((order, type(first)))

    async def handle_async(order: Any, first: Any) -> None:
        seen.append((order, type(first)))

    handler: Any = handle if plain else handle_async
    handler.__annotations__ = {"order": payload, "first": first}
    return handler


@pytest.mark.parametrize(
    ("driver", "entry"),
    [
        *product(["psycopg", "asyncpg"], ENTRIES),
        *product(POOLS, ["handles", "handles_batch"]),
    ],
)
async def test_each_kind_of_handler_gets_decoded_payloads_from_each_executor(
    driver: str, entry: str, database_url: str
) -> None:
    good, bad = Message("orders.placed", ORDER), Message("orders.placed", {"id": 1})
    seen: list[Any] = []
    handler = handler_of(entry, driver, seen)
    source = MemorySource(bad, good)
    async with consuming(
        database_url, source, handler, ENTRIES[entry], driver=driver
    ) as events:
        await events.wait_for(MessageHandled)
        (letter,) = await events.wait_for(MessageDeadLettered)
    ((order, first),) = seen
    assert order == ([Model(**ORDER)] if entry == "handles_batch" else Model(**ORDER))
    assert first is not Message
    assert letter.attempts == 1
    assert "doesn't fit the handler: at $.id: uuid_type" in letter.reason
    assert execute(database_url, "SELECT message_id FROM inbox.receipt") == [(good.id,)]


def test_an_idempotent_function_of_another_library_gets_its_messages_as_they_are(
    database_url: str,
) -> None:
    def key(record: dict[str, Any]) -> UUID:
        return UUID(record["id"])

    @idempotent(consumer="billing", key=key)
    def bill(session: Session, record: dict[str, Any]) -> object:
        return record

    record = {"id": str(uuid7())}
    with sessions_of(database_url) as sessions, sessions.begin() as session:
        assert bill(session, record) is record
