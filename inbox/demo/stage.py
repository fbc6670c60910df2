"""Print the progress of the demo, and wait for its processes."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Engine

from inbox.demo import tally
from inbox.demo.processes import Processes

_TICK: Final = 0.5
_BETWEEN_LINES: Final = 2.0
_PATIENCE: Final = 120.0


def say(line: str = "") -> None:
    """Print a line and flush it."""
    print(line, flush=True)


def verdict(what: str, count: int, right: bool) -> bool:
    """Print one count with its verdict."""
    say(f"  {'✔' if right else '✘'} {what:<45} {count:>7,}")
    return right


@dataclass(slots=True)
class Stage:
    """The state of the demo.

    Attributes:
        tenant: marks the messages of this run.
        stuck: a wait has failed, so further waits end at once.
    """

    engine: Engine
    processes: Processes
    tenant: str
    stuck: bool = False

    def progress(self) -> tally.Progress:
        """Read the progress of the relay and the consumers."""
        return tally.progress(self.engine, self.tenant)

    def watch(self, reached: Callable[[tally.Progress], bool]) -> None:
        """Show the progress until `reached` is true or the progress stops."""
        seen = shown = None
        moved = time.monotonic()
        said = 0.0
        while True:
            now = self.progress()
            if now != seen:
                seen, moved = now, time.monotonic()
            done = reached(now)
            ended = self.processes.failed()
            waited = time.monotonic() - said > _BETWEEN_LINES
            if now != shown and (done or ended or waited):
                shown, said = now, time.monotonic()
                say(_line(now))
            if done or self.stuck:
                return
            if ended or time.monotonic() - moved > _PATIENCE:
                say(f"  no progress; ended processes: {ended or 'none'}")
                self.stuck = True
                return
            time.sleep(_TICK)


def _line(now: tally.Progress) -> str:
    said = (
        f"  committed {now.committed:>6,}   published {now.published:>6,}"
        f"   billing {now.billing:>6,}   shipping {now.shipping:>6,}"
    )
    return f"{said}   dead letters {now.failed:>5,}" if now.failed else said
