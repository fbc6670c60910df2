"""What our processes say of validation errors contains no input.

Only the stack trace of a dead letter, beside the payload, has their texts. A handler
validates more than its message, for example the answer of another service.
"""

import enum
import ipaddress
import logging
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from functools import partial
from types import new_class
from typing import Any

import attrs
import jsonschema
import msgspec
import pydantic
import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from pillarbox import Consumer, DeadLetter, Message, RetryLater, SchemaRegistry
from pillarbox.inbox.events import (
    HandlerFailed,
    MessageDeadLettered,
    MessageHandled,
    RetryRequested,
)
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.errors import message_of, one_line, traceback_of
from pillarbox.outbox.observability.logging import LogEvents
from tests.fixtures.consumers import QUICK, async_sessions_of, running
from tests.fixtures.sessions import execute

SECRET = "jane@example.org"


class Order(pydantic.BaseModel):
    total: int
    lines: dict[str, int] = {}


class Struct(msgspec.Struct):
    total: int
    kind: msgspec.Raw = msgspec.Raw(b"{}")


@attrs.define
class Checked:
    total: Any = attrs.field(validator=attrs.validators.instance_of(int))


@attrs.define
class Bounded:
    name: str = attrs.field(validator=attrs.validators.lt("a"))


Card = enum.Enum("Card", ["VISA"])


def kind_of(value: Any) -> Card:
    return Card(value)


def host_of(value: Any) -> object:
    return ipaddress.ip_address(value)


def day_of(value: Any) -> date:
    return datetime.strptime(value, "%Y").date()  # noqa: DTZ007


CONVERTERS: dict[str, Any] = {
    "int": int,
    "Enum": kind_of,
    "ip_address": host_of,
    "strptime": day_of,
    "pipe": attrs.converters.pipe(str.strip, float),
    "to_bool": attrs.converters.to_bool,
}


def converted(name: str) -> object:
    fields = {"total": attrs.field(converter=CONVERTERS[name])}
    made: Any = attrs.make_class("Converted", fields)
    return made(SECRET)


@attrs.define
class Assigned:
    total: Any = attrs.field(converter=int)


def by_assignment() -> None:
    attrs.evolve(Assigned(1)).total = SECRET


@dataclass
class Plain:
    total: int


def structured_without_detail() -> None:
    """Raise as `cattrs` does without detailed validation: Python's own error."""
    code = compile("int(text)", "/lib/site-packages/cattrs/converters.py", "eval")
    eval(code, {"text": SECRET})


def of(module: str, name: str, base: type[Exception]) -> Any:
    """Return the double of a class of a library that the tests don't install."""
    return new_class(name, (base,), exec_body=lambda it: it.update(__module__=module))


def by_cattrs() -> None:
    """Raise as `cattrs.structure` does: a group of Python's own errors, with notes."""
    wrong = ValueError(f"invalid literal for int() with base 10: '{SECRET}'")
    wrong.add_note(f"Structuring mapping value @ key '{SECRET}'")
    kind = of("cattrs.errors", "ClassValidationError", ExceptionGroup)
    raise kind("While structuring Order", [wrong])


def by_marshmallow() -> None:
    kind = of("marshmallow.exceptions", "ValidationError", ValueError)
    raise kind({"total": [f"{SECRET} is no number."]})


WAYS: dict[str, Callable[[], object]] = {
    "pydantic": lambda: Order(total=SECRET),  # type: ignore[arg-type]
    "pydantic, key": lambda: Order(total=1, lines={SECRET: "x"}),  # type: ignore[dict-item]
    "msgspec": lambda: msgspec.convert({"total": SECRET}, Struct, strict=False),
    "jsonschema": lambda: jsonschema.validate(SECRET, {"type": "integer"}),
    "attrs": lambda: Checked(SECRET),
    "attrs, bound": lambda: Bounded(SECRET),
    **{f"attrs, {name}": partial(converted, name) for name in CONVERTERS},
    "attrs, assignment": by_assignment,
    "attrs, unknown keyword": lambda: Assigned(**{SECRET: 1}),
    "dataclass, unknown keyword": lambda: Plain(**{SECRET: 1}),
    "cattrs": by_cattrs,
    "cattrs, without detail": structured_without_detail,
    "marshmallow": by_marshmallow,
}


def raised_by(way: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as it:
        way()
    return it.value


def wrapped(error: Any) -> Iterator[Exception]:
    """Yield what handlers raise instead, each with and without a cause."""
    texts = [f"bad answer: {error}", repr(error), str([str(error)]), str(error)[:70]]
    for name in ("errors", "json", "message", "messages", "args"):
        found = getattr(error, name, "")
        texts += [f"bad answer: {found() if callable(found) else found}"]
    for text in texts:
        for kind in (RuntimeError, DeadLetter):
            for is_hidden in (False, True):
                yield caught_while(error, kind(text), None if is_hidden else error)
        yield ExceptionGroup(text, [error])
    yield ExceptionGroup("nested", [ExceptionGroup("group", [error])])


def caught_while(
    error: Exception, then: Exception, cause: Exception | None
) -> Exception:
    def handle() -> None:
        try:
            raise error  # noqa: TRY301
        except Exception:  # noqa: BLE001
            raise then from cause

    return raised_by(handle)


@pytest.mark.parametrize("library", WAYS)
def test_a_validation_error_shows_no_input_however_it_is_wrapped(library: str) -> None:
    error = raised_by(WAYS[library])
    says_it = SECRET in "".join(traceback.format_exception(error))
    assert says_it or library == "msgspec"
    error.add_note(f"the input was {SECRET}")

    for each in (error, *wrapped(error)):
        assert SECRET not in one_line(each), repr(each)
        assert SECRET not in traceback_of(each), repr(each)
    said = traceback_of(error)
    assert "Traceback (most recent call last)" in said
    assert type(error).__qualname__ in said


def test_the_place_and_the_words_of_the_handler_are_kept() -> None:
    error = raised_by(WAYS["pydantic"])
    quoting = caught_while(error, DeadLetter(f"order 12 is odd: {error}"), None)
    own = caught_while(error, DeadLetter("the total is not a valid number"), error)

    place = r"raised in <lambda> \(test_validation_texts\.py, line \d+\)"
    assert re.fullmatch(place, message_of(error))
    said = rf"DeadLetter: order 12 is odd: (1 validation error for )?{place}"
    assert re.fullmatch(said, one_line(quoting))
    assert one_line(own) == "DeadLetter: the total is not a valid number"


async def test_a_failed_handler_writes_no_input_but_into_the_stack_trace(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    asked: list[str] = []
    async with async_sessions_of(database_url) as sessions:
        source = MemorySource(*(Message(library, b"") for library in WAYS))
        consumer = Consumer(source, sessions, name="c", retry=QUICK)
        consumer.observe(LogEvents())

        @consumer.handles("*")
        async def handle(session: AsyncSession, message: Message) -> None:
            try:
                WAYS[message.topic]()
            except Exception as error:
                if message.topic in asked:
                    raise
                asked.append(message.topic)
                raise RetryLater(timedelta(0), f"a bad answer: {error}") from error

        async with running(consumer) as events:
            await events.wait_for(MessageDeadLettered, len(WAYS))

    assert len(events.of(HandlerFailed)) == (QUICK.max_attempts - 1) * len(WAYS)
    postponed = events.of(RetryRequested)
    assert len(postponed) == len(WAYS)
    assert all(event.reason.startswith("a bad answer: ") for event in postponed)
    letters = execute(
        database_url,
        "SELECT topic, error_reason, error_stacktrace FROM inbox.dead_letter",
    )
    assert caplog.text.count("MessageDeadLettered") == len(letters) == len(WAYS)
    for topic, reason, trace in letters:
        assert SECRET not in reason
        assert SECRET in trace or topic == "msgspec"
    assert SECRET not in caplog.text + repr(events.events)


async def test_only_the_validation_of_the_messages_own_payload_is_permanent(
    database_url: str,
) -> None:
    registry = SchemaRegistry()
    registry.register("orders", Order)
    answers: list[object] = [SECRET, 7]
    async with async_sessions_of(database_url) as sessions:
        source = MemorySource(
            Message("orders", {"total": SECRET}), Message("orders", {"total": 1})
        )
        consumer = Consumer(source, sessions, name="c", retry=QUICK, registry=registry)

        @consumer.handles("orders")
        async def handle(session: AsyncSession, message: Message) -> None:
            Order.model_validate({"total": answers.pop(0)})

        async with running(consumer) as events:
            (dead,) = await events.wait_for(MessageDeadLettered)
            (handled,) = await events.wait_for(MessageHandled)

    assert dead.attempts == 1
    assert "at $.total: int_parsing" in dead.reason
    assert [failed.id for failed in events.of(HandlerFailed)] == [handled.id]
