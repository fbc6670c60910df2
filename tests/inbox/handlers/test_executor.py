"""Sync and async handlers obey the same rules."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from pillarbox import Message
from pillarbox.inbox.errors import HandlerTimeoutError
from pillarbox.inbox.handlers.attempt import Attempt, run_now
from pillarbox.inbox.handlers.calls import Call
from pillarbox.inbox.handlers.registration import Registered
from pillarbox.inbox.handlers.signature import Takes
from pillarbox.inbox.handlers.terms import Terms
from pillarbox.outbox.errors import ConfigError
from tests.fixtures.waiting import let_pass

MESSAGE = Message("orders.placed", b"old")
SESSION: Any = None


def unchanged(message: Message) -> Message:
    return message


def handlers(do: Callable[[Message], Any]) -> list[Any]:
    """Return the same handler as a plain function and as a coroutine function."""

    def plain(session: Any, message: Message) -> Any:
        return do(message)

    async def coroutine(session: Any, message: Message) -> Any:
        return do(message)

    return [plain, coroutine]


async def call(handler: Any, terms: Terms) -> None:
    registered = Registered(handler, Takes.ONE, terms)
    running = Call("", MESSAGE, None)
    attempt = Attempt(registered, [MESSAGE], "billing", None, running)
    await attempt.call(SESSION, [MESSAGE])


def raising(error: Exception) -> list[Any]:
    def do(message: Message) -> None:
        raise error

    return handlers(do)


KINDS = pytest.mark.parametrize("kind", [0, 1], ids=["sync", "async"])


async def test_a_function_that_exceeds_its_time_limit_has_failed() -> None:
    def slow(session: Any, message: Message) -> None:
        let_pass(0.002)

    terms = Terms(unchanged, time_limit=timedelta(milliseconds=1))
    with pytest.raises(HandlerTimeoutError, match=r"slow: exceeded its time limit"):
        await call(slow, terms)


@KINDS
async def test_a_timeout_error_raised_by_the_handler_is_an_ordinary_failure(
    kind: int,
) -> None:
    terms = Terms(unchanged, time_limit=timedelta(hours=1))

    with pytest.raises(TimeoutError, match="upstream") as caught:
        await call(raising(TimeoutError("upstream"))[kind], terms)
    assert not isinstance(caught.value, HandlerTimeoutError)


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"time_limit": timedelta(0)}, "time_limit=0s: must be above 0s"),
        ({"permanent": (ValueError, "KeyError")}, "'KeyError': isn't an exception"),
        ({"permanent": (KeyboardInterrupt,)}, "isn't an exception class"),
    ],
)
def test_invalid_handler_terms_are_refused(terms: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Terms(unchanged, **terms)


def test_what_runs_without_a_loop_may_not_wait() -> None:
    async def wait() -> None:
        await asyncio.sleep(0)  # noqa: TID251 - it waits, which is refused

    with pytest.raises(AssertionError, match=r"wait at 0x.* waits"):
        run_now(wait)
