"""The base of the conformance suites of publishers and sources; needs only pytest."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from dataclasses import field, fields
from typing import Any, ClassVar, Final, ParamSpec
from uuid import uuid4

import pytest

__all__ = ["BrokerCase", "capability", "checks"]

P = ParamSpec("P")

_LIMIT: Final = 240.0
_GRACE: Final = 10.0


def capability(meaning: str, *, default: bool = True) -> Any:
    """Declare a field of a Capabilities class; a skipped test shows its `meaning`."""
    return field(default=default, metadata={"meaning": meaning})


class BrokerCase:
    """Actions on the broker that both suites need.

    Attributes:
        patience: the seconds within which a call must end, whatever the broker does.
    """

    patience: ClassVar[float] = 60.0

    def topic(self) -> str:
        """Return the name of a topic that no other test uses."""
        return f"suite-{uuid4().hex}"

    def stop_broker(self) -> None:
        """Break all connections and refuse new ones. For `goes_away`."""
        raise NotImplementedError

    def start_broker(self) -> None:
        """Make the broker available again. For `goes_away`."""
        raise NotImplementedError

    def cut_connections(self) -> None:
        """Break the open connections. For `goes_away`."""
        self.stop_broker()
        self.start_broker()

    def stall_broker(self) -> None:
        """Let nothing through, but keep connections open. For `stalls`."""
        raise NotImplementedError

    def resume_broker(self) -> None:
        """Let everything through again. For `stalls`."""
        raise NotImplementedError


def checks(
    *needed: str,
) -> Callable[[Callable[P, Coroutine[Any, Any, None]]], Callable[P, None]]:
    """Turn a coroutine method into a test, skipped if a needed capability is absent.

    The test gets its own event loop, must end within 240 s, and must leave no task
    running.
    """

    def decorate(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
        @functools.wraps(test)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            _skip_without(needed, args[0].capabilities)  # type: ignore[attr-defined]
            with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
                runner.run(_leaving_no_task(test(*args, **kwargs)))

        return run

    return decorate


def _skip_without(needed: tuple[str, ...], capabilities: Any) -> None:
    meanings = {f.name: f.metadata.get("meaning", "") for f in fields(capabilities)}
    for name in needed:
        if not getattr(capabilities, name):
            pytest.skip(f"declared absent: {name}. {meanings[name]}")


async def _leaving_no_task(test: Coroutine[Any, Any, None]) -> None:
    async with asyncio.timeout(_LIMIT):
        await test
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        # A task that is about to end doesn't count as left behind.
        _, left = await asyncio.wait(left, timeout=_GRACE)
    assert not left, f"tasks left behind: {[str(task.get_coro()) for task in left]}"
