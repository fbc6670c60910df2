"""Call a long handler until it ends, by itself or because it was told to.

A coroutine is told by being cancelled, a plain function finds it in its job.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from inbox.errors import HandlerTimeoutError
from inbox.handlers.executor import Handling
from inbox.handlers.prepare import Terms
from inbox.handlers.routes import name_of
from inbox.jobs.job import AnyJob
from inbox.jobs.lease import End, Lease

# For what is cancelled to end: a handler for the second time, at the end of the drain.
_LAST_STEPS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a handler ended: what it raised, why it was to end, and if it was told."""

    error: BaseException | None
    end: End | None
    is_told: bool

    @property
    def is_done(self) -> bool:
        """Whether it has run to its end. Who was told and returns broke off.

        A plain function that never looked has done all of its work.
        """
        if self.error is not None or self.end is End.TIMED_OUT:
            return False
        return self.end is None or not self.is_told


async def call_until_end(
    handling: Handling,
    handler: Callable[..., Any],
    job: AnyJob,
    lease: Lease,
    terms: Terms,
    stopping: asyncio.Event,
) -> Ended:
    """Call it, keep its lease meanwhile, and tell it when there is a reason to end.

    Whatever happens here, its task has ended afterwards, if it heeds a cancellation.
    """
    limit = terms.time_limit
    work = asyncio.ensure_future(handling.call(handler, job, job.message))
    keeping = asyncio.create_task(lease.keep())
    stop = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait(
            {work, stop, lease.ended},
            timeout=None if limit is None else limit.total_seconds(),
            return_when=asyncio.FIRST_COMPLETED,
        )
        end: End | None = None
        is_told = False
        if not work.done():
            end = _why(lease, stop)
            overrun = None
            if end is End.TIMED_OUT and limit is not None:
                overrun = HandlerTimeoutError(name_of(handler), limit)
            job.end(overrun)
            is_told = handling.interrupt(work)
            await asyncio.wait({work})
    except BaseException:
        # The drain is over: a plain function goes on, and can't commit any more.
        job.end()
        await _end(work)
        await lease.let_go()
        raise
    finally:
        await _end(keeping, stop)
    error = asyncio.CancelledError() if work.cancelled() else work.exception()
    return Ended(error, end, is_told or job.has_seen_end)


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and leave those alone that don't heed it."""
    for task in tasks:
        task.cancel()
    ended, _ = await asyncio.wait(tasks, timeout=_LAST_STEPS)
    for task in ended:
        if not task.cancelled():
            task.exception()  # nobody else looks at it


def _why(lease: Lease, stop: asyncio.Future[Any]) -> End:
    if lease.ended.done():
        return lease.ended.result()
    return End.STOPPED if stop.done() else End.TIMED_OUT
